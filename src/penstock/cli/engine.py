"""Starts an engine for the duration of a command."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import EngineClient


@asynccontextmanager
async def own_engine(config: EngineConfig) -> AsyncIterator[EngineClient]:
    """Yields a client of a new engine, which is closed at the end. Raises EngineError if the engine fails.

    The command prints that error, so the engine's own log of it is off.
    """
    logging.getLogger("penstock.engine").addHandler(logging.NullHandler())
    client = await launch(config)
    try:
        yield client
    finally:
        await client.close()
