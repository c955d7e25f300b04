"""HTTP below the wires: connections, the bytes of a body, access control, and how an answer is sent."""
