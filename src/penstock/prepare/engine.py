"""Starts an engine for the duration of a command, and checks the model's files while it starts."""

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
    """Yields a client of an engine in a process of its own. The engine is closed when the block ends.

    Raises EngineError if the engine fails, and CheckpointError if a file differs from the model's manifest.

    `started` is an engine process that already has `config`; without it, a new process is started. With `resumes`, an
    engine process that ends is replaced, and its requests continue.
    """
    # The command prints the engine's error. The handler keeps the engine's log from printing it too.
    logging.getLogger("penstock.engine").addHandler(logging.NullHandler())
    check = ManifestCheck(Path(config.model))
    starting = spawn(config, resumes=resumes) if started is None else connect(config, started, resumes=resumes)
    client = await verified(starting, check)
    try:
        yield client
    finally:
        await client.close()


async def verified(starting: Awaitable[Client], check: ManifestCheck) -> Client:
    """Returns the client that `starting` gives, once `check` has passed. The two run at the same time.

    Raises EngineError if the engine does not start, and CheckpointError if a file differs from the manifest. In both
    cases the engine is closed.
    """
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
