"""The engine: the core loop, where it may live, and the client that reaches it there."""

from penstock.engine.client import StreamingClient
from penstock.engine.launch import launch

__all__ = ["StreamingClient", "launch"]
