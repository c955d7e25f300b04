"""Starts an engine for the duration of a command."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from penstock.config import EngineConfig
from penstock.engine.link.engine_child import EngineChild
from penstock.engine.link.ipc import connect, spawn
from penstock.messages import EngineClient
from penstock.weights.manifest import ManifestCheck

Client = TypeVar("Client", bound=EngineClient)
log = logging.getLogger("penstock.weights")


@asynccontextmanager
async def own_engine(
    config: EngineConfig, started: EngineChild | None = None, *, resumes: bool = False
) -> AsyncIterator[EngineClient]:
    """Yields a client of a new engine, which is closed at the end. Raises EngineError if the engine fails.

    Raises CheckpointError for a file that differs from the model's manifest.

    An engine that `resumes` is started again when it ends, and its requests go on. `started` is its process if it has
    already been started and sent `config`. The command prints the error, so the engine's own log of it is off.
    """
    logging.getLogger("penstock.engine").addHandler(logging.NullHandler())
    check = ManifestCheck(Path(config.model))
    starting = spawn(config, resumes=resumes) if started is None else connect(config, started, resumes=resumes)
    client = await verified(starting, check)
    try:
        yield client
    finally:
        await client.close()


async def verified(starting: Awaitable[Client], check: ManifestCheck) -> Client:
    """Returns the client of an engine that starts, once the model's files are checked. Raises EngineError if the engine
    does not start, and CheckpointError for a wrong file; nothing is left then."""
    client: Client | None = None
    try:
        client = await starting
        found = await asyncio.to_thread(check.result)
    except BaseException:
        check.cancel()
        if client is not None:
            await client.close()
        raise
    if found is not None:
        log.info("%s", found)
    return client
