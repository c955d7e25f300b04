"""Messages, frames and sockets between the API process and the engine, and the engine's process."""
