"""The engine of a command that ends with it."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import EngineClient


@asynccontextmanager
async def own_engine(config: EngineConfig) -> AsyncIterator[EngineClient]:
    """A client of a new engine, which is closed in the end. Raises EngineError where it fails: that is told once, by
    whoever catches it, and not by a log as well."""
    logging.getLogger("penstock.engine").addHandler(logging.NullHandler())
    client = await launch(config)
    try:
        yield client
    finally:
        await client.close()
