"""What goes between the API process and the engine: messages, frames, sockets, and the process at the other end."""
