"""HTTP below the wires: connections, the bytes of a body, who may ask, and how an answer is sent."""
