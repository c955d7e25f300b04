"""Starts an engine for the duration of a command."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.config import EngineConfig
from penstock.engine.link.engine_child import EngineChild
from penstock.engine.link.ipc import connect, spawn
from penstock.messages import EngineClient


@asynccontextmanager
async def own_engine(
    config: EngineConfig, started: EngineChild | None = None, *, resumes: bool = False
) -> AsyncIterator[EngineClient]:
    """Yields a client of a new engine, which is closed at the end. Raises EngineError if the engine fails.

    An engine that `resumes` is started again when it ends, and its requests go on. `started` is its process if it has
    already been started and sent `config`. The command prints the error, so the engine's own log of it is off.
    """
    logging.getLogger("penstock.engine").addHandler(logging.NullHandler())
    client = await (spawn(config, resumes=resumes) if started is None else connect(config, started, resumes=resumes))
    try:
        yield client
    finally:
        await client.close()
