"""Runs the open batches side by side while the server runs, and deletes what has expired."""

import asyncio
import logging
import time
from collections.abc import Awaitable
from functools import partial

from penstock.frontend.errors import APIError
from penstock.frontend.http.keys import Keys
from penstock.frontend.jobs.job import BatchJob
from penstock.frontend.jobs.places import BatchPlaces
from penstock.frontend.limits import RequestLimits
from penstock.frontend.local import LocalRequests
from penstock.frontend.storage import batches, files, responses
from penstock.frontend.storage.database import Database, vacuum

SWEEP_SECONDS = 60.0  # between deletions of what has expired, and tries after an error
_log = logging.getLogger("penstock.batches")


class BatchRunner:
    """Runs the open batches, whose requests take turns, the oldest first."""

    def __init__(
        self,
        storage: Database,
        keys: Keys,
        local: LocalRequests,
        limits: RequestLimits,
        places: BatchPlaces,
        fresh: bool = True,
    ) -> None:
        """Batches of other holders than those of `keys` wait: no client of this server could read their answers.
        `fresh`: no process of this server has received a file yet."""
        self._storage = storage
        self._keys = keys
        self._local = local
        self._limits = limits
        self._places = places
        self._fresh = fresh
        self._woken = asyncio.Event()
        self._checking = asyncio.Lock()
        self._jobs: dict[str, BatchJob] = {}

    def wake(self) -> None:
        """A batch is new, or is to be cancelled."""
        self._woken.set()
        for job in self._jobs.values():
            job.changed.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        if self._fresh and self._storage.exists:
            await self._try(self._storage.run(files.hide_abandoned, reserve=True))
        swept = -SWEEP_SECONDS
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._woken.clear()
                if self._storage.exists:
                    await self._try(self._start_jobs(tasks))
                    if time.monotonic() - swept >= SWEEP_SECONDS:
                        await self._try(self._sweep())
                        swept = time.monotonic()
                await _wait(self._woken)

    async def close(self) -> None:
        """Closes the storage. Nothing may use it after this."""
        await self._storage.close()

    async def _start_jobs(self, tasks: asyncio.TaskGroup) -> None:
        for batch in await self._storage.run(partial(batches.opened, owners=self._keys.tenants)):
            if batch["id"] not in self._jobs:
                job = self._jobs[batch["id"]] = BatchJob(batch, self._storage, self._local, self._limits, self._places)
                tasks.create_task(self._run(batch["id"], job))

    async def _run(self, batch_id: str, job: BatchJob) -> None:
        """Runs a batch to its end. After an error it runs again, but not at once."""
        try:
            await job.run(self._checking)
        except Exception as error:
            if isinstance(error, APIError):  # the storage failed: later it may not
                _log.error("batch %s waits for %g s: %s", batch_id, SWEEP_SECONDS, error.message)
            else:
                _log.exception("batch %s waits for %g s after an error", batch_id, SWEEP_SECONDS)
            job.changed.clear()
            await _wait(job.changed)
        del self._jobs[batch_id]
        self._woken.set()

    async def _sweep(self) -> None:
        for expire in (responses.expire, files.expire, batches.expire):
            while await self._storage.run(expire, reserve=True):
                await asyncio.sleep(0)
        for _ in range(4):
            await self._storage.run(vacuum, reserve=True)

    async def _try(self, work: Awaitable[None]) -> None:
        try:
            await work
        except APIError as error:
            _log.error("the storage failed: %s", error.message)
        except Exception:
            _log.exception("the storage failed")


async def _wait(event: asyncio.Event) -> None:
    """Returns when the event is set, or after SWEEP_SECONDS."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=SWEEP_SECONDS)
    finally:
        waiting.cancel()
