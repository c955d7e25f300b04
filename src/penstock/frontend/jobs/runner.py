"""Answers the requests of batches, one batch after the other, while the server runs."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from penstock.frontend.batch_lines import BatchLine, read_line, write_line
from penstock.frontend.errors import APIError
from penstock.frontend.jobs.input import InputError, check_input, read_lines
from penstock.frontend.limits import RequestLimits
from penstock.frontend.local import ServedRequests
from penstock.frontend.storage import batches, files, responses
from penstock.frontend.storage.database import Database

SWEEP_SECONDS = 60.0  # between deletions of what has expired, and tries after an error
_LOOK_SECONDS = 0.05  # until a busy server is looked at again
_DELETED = "the input file was deleted, or has expired, before all of its requests were answered"
_log = logging.getLogger("penstock.batches")


class _Ended(Exception):
    """A batch ends before all of its requests are answered. The argument is its status."""


class BatchRunner:
    """Runs the open batches in the order in which they were created, and deletes what has expired.

    All state is in the storage. A request whose answer is stored is not sent again, so each is answered once, whenever
    the process ends.
    """

    def __init__(
        self, storage: Database, local: ServedRequests, limits: RequestLimits, most: int, others: Callable[[], int]
    ) -> None:
        """`most` requests are in the engine at a time; a quarter of these while `others`, which counts the requests of
        clients in flight, is above 0."""
        self._storage = storage
        self._local = local
        self._limits = limits
        self._most = most
        self._others = others
        self._woken = asyncio.Event()
        self._freed = asyncio.Event()
        self._running = 0
        self._failed = False

    def wake(self) -> None:
        """A batch is new, or is to be cancelled."""
        self._woken.set()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        if self._storage.exists:
            await self._try(self._storage.run(files.remove_abandoned))
        while True:
            self._woken.clear()
            try:
                while self._storage.exists and (batch := await self._storage.run(batches.first_open)) is not None:
                    await self._run(batch)
                if self._storage.exists:
                    await self._sweep()
            except APIError as error:  # the storage failed: later it may not
                _log.error("batches wait for %g s: %s", SWEEP_SECONDS, error.message)
                self._woken.clear()
            except Exception:
                _log.exception("batches wait for %g s after an error", SWEEP_SECONDS)
                self._woken.clear()
            await self._try(asyncio.wait_for(self._woken.wait(), SWEEP_SECONDS))

    async def close(self) -> None:
        """Closes the storage. Nothing may use it after this."""
        await self._storage.close()

    async def _run(self, batch: batches.Fields) -> None:
        """Runs a batch to its end, whatever that is."""
        try:
            if batch["status"] == "validating":
                await self._validate(batch)
            await self._answer_all(batch)
            await self._end(batch, "completed")
        except InputError as error:
            await self._end(batch, "failed", error.errors)
        except _Ended as ended:
            await self._end(batch, str(ended))
        except APIError as error:
            if error.status != 507:
                raise
            _log.error("batch %s fails: %s", batch["id"], error.message)
            await self._end(batch, "failed", [_shown(error)])

    async def _validate(self, batch: batches.Fields) -> None:
        def read_input(connection: Any) -> None:
            files.find(connection, batch["owner"], batch["input_file_id"])

        try:
            await self._storage.run(read_input)
        except APIError as error:
            if error.status != 404:
                raise
            raise InputError([_shown(error)]) from None
        total = await check_input(self._storage, batch["input_file_id"], batch["endpoint"], self._limits)

        def begin(connection: Any) -> None:
            self._check_open(connection, batch)
            until = batch["kept_until"]
            for field, suffix in (("output", "output"), ("errors_to", "error")):
                name = f"{batch['id']}_{suffix}.jsonl"
                batch[field] = files.begin(connection, batch["owner"], name, "batch_output", until)
            batch.update(status="in_progress", in_progress_at=int(time.time()))
            batch["request_counts"]["total"] = total
            batches.save(connection, batch)

        await self._storage.run(begin)

    async def _answer_all(self, batch: batches.Fields) -> None:
        """Answers the requests that have no answer yet. Raises _Ended, InputError and APIError."""

        def read_done(connection: Any) -> set[int]:
            return {*files.numbers(connection, batch["output"]), *files.numbers(connection, batch["errors_to"])}

        if batch["status"] == "cancelling":
            raise _Ended("cancelled")
        done, self._failed = await self._storage.run(read_done), False
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._start_all(batch, done, tasks)
        except* (_Ended, InputError, APIError) as group:
            raised = next(_leaves(group))
        else:
            return
        raise raised

    async def _start_all(self, batch: batches.Fields, done: set[int], tasks: asyncio.TaskGroup) -> None:
        """Starts a task for each request that is not done, as many at a time as the engine takes. When the batch ends
        early, those that have been started are answered first."""
        count = 0
        async with aclosing(read_lines(self._storage, batch["input_file_id"], self._limits)) as groups:
            async for lines in groups:
                count += len(lines)
                for number, line in lines:
                    if number in done:
                        continue
                    await self._slot()
                    if self._failed:  # Python 3.11's wait_for may swallow the cancellation by the group
                        return
                    if ended := await self._ended(batch):
                        await self._all_answered()
                        raise _Ended(ended)
                    request = read_line(line, (batch["endpoint"],))
                    self._running += 1
                    tasks.create_task(self._answer(batch, number, request)).add_done_callback(self._free)
        if count < batch["request_counts"]["total"]:
            await self._all_answered()
            raise InputError([{"code": "file_deleted", "line": None, "message": _DELETED, "param": "input_file_id"}])

    async def _answer(self, batch: batches.Fields, number: int, request: BatchLine) -> None:
        request_id = secrets.token_hex(12)
        answer = await self._local.answer_later(request.url, bytes(request.body), request_id, batch["owner"])
        line = write_line(request.custom_id, request_id, answer)
        file_id = batch["output"] if answer.status == 200 else batch["errors_to"]
        await self._storage.run(lambda connection: files.append(connection, file_id, number, line))

    async def _all_answered(self) -> None:
        while self._running:
            self._freed.clear()
            await self._freed.wait()

    async def _slot(self) -> None:
        """Returns when another request may be sent to the engine."""
        while self._running >= (max(self._most // 4, 1) if self._others() else self._most):
            self._freed.clear()
            await self._try(asyncio.wait_for(self._freed.wait(), _LOOK_SECONDS))

    def _free(self, task: "asyncio.Task[None]") -> None:
        self._running -= 1
        self._failed = self._failed or task.cancelled() or task.exception() is not None
        self._freed.set()

    async def _ended(self, batch: batches.Fields) -> str:
        """The status with which a batch ends now, or ""."""
        if time.time() > batch["expires_at"]:
            return "expired"
        if not self._woken.is_set():
            return ""
        self._woken.clear()
        found = await self._storage.run(lambda db: batches.find(db, batch["owner"], batch["id"]))
        return "cancelled" if found["status"] == "cancelling" else ""

    def _check_open(self, connection: Any, batch: batches.Fields) -> None:
        if batches.find(connection, batch["owner"], batch["id"])["status"] == "cancelling":
            raise _Ended("cancelled")

    async def _end(self, batch: batches.Fields, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        """Shows the batch's files to its owner, and its status."""

        def end(connection: Any) -> None:
            counts, now = batch["request_counts"], int(time.time())
            latest = batches.find(connection, batch["owner"], batch["id"])
            batch.update(status=status, cancelling_at=latest["cancelling_at"])
            batch[f"{status}_at"] = now
            if status == "completed":
                batch["finalizing_at"] = now
            if errors:
                batch["errors"] = {"object": "list", "data": errors}
            for source, suffix, count in (("output", "output", "completed"), ("errors_to", "error", "failed")):
                file_id = batch[source]
                if file_id is None:
                    continue
                counts[count] = files.count(connection, file_id)
                if counts[count]:
                    name = f"{batch['id']}_{suffix}.jsonl"
                    files.complete(connection, file_id, name, "batch_output", batch["kept_until"])
                    batch[f"{suffix}_file_id"] = file_id
                else:
                    files.remove(connection, file_id)
                batch[source] = None
            batches.save(connection, batch, ended=True)

        await self._storage.run(end, reserve=True)
        _log.info("batch %s: %s, %s", batch["id"], status, batch["request_counts"])

    async def _sweep(self) -> None:
        for expire in (responses.expire, files.expire, batches.expire):
            while await self._storage.run(expire):
                await asyncio.sleep(0)
        await self._storage.run(lambda connection: connection.execute("PRAGMA incremental_vacuum(4096)").fetchall())

    async def _try(self, work: Any) -> None:
        try:
            await work
        except TimeoutError:
            pass
        except APIError as error:
            _log.error("the storage failed: %s", error.message)


def _shown(error: APIError) -> dict[str, Any]:
    return {"code": error.code, "line": None, "message": error.message, "param": error.param}


def _leaves(group: BaseExceptionGroup[Any]) -> Any:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
