"""Starts an engine in a process of its own or on a thread."""

from penstock.config.engine import EngineConfig
from penstock.engine.client import StreamingClient
from penstock.engine.inprocess import start_thread
from penstock.engine.link.ipc import spawn


async def launch(config: EngineConfig, *, in_process: bool = False) -> StreamingClient:
    """A client of a new engine that is ready to serve: in a process of its own, or on a thread of this one.

    Raises EngineError with the reason when it does not get ready; nothing is left running then.
    """
    return await (start_thread(config) if in_process else spawn(config))
