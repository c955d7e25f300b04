"""Runs one batch, from the check of its input to its end."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

from penstock.frontend.errors import APIError
from penstock.frontend.jobs.input import InputError, Lines, check_input, read_lines
from penstock.frontend.jobs.lines import BatchLine, read_line, write_line
from penstock.frontend.jobs.places import BatchPlaces
from penstock.frontend.limits import RequestLimits
from penstock.frontend.local import LocalRequests
from penstock.frontend.storage import batches, files
from penstock.frontend.storage.database import Database

_DELETED = "the input file was deleted, or has expired, before all of its requests were answered"
_GROUP_BYTES = 1 << 20  # of answers in a transaction, which the spare of a full disk must hold
_log = logging.getLogger("penstock.batches")


class _BatchEnded(Exception):
    """A batch ends before all of its requests are answered. The argument is its status."""


class BatchJob:
    """A batch that is open. Its state is in the storage: a request whose answer is stored is not sent again, so each is
    answered once, whenever the process ends."""

    def __init__(
        self,
        batch: batches.Fields,
        storage: Database,
        local: LocalRequests,
        limits: RequestLimits,
        places: BatchPlaces,
    ) -> None:
        self.changed = asyncio.Event()  # set: the batch may be cancelled
        self._batch = batch
        self._storage = storage
        self._local = local
        self._limits = limits
        self._places = places
        self._running = 0  # requests whose answers are not stored; each has a place
        self._unstored: list[files.Chunk] = []  # answers
        self._storing = False
        self._stored = asyncio.Event()  # some of them

    async def run(self, checking: asyncio.Lock) -> None:
        """Runs the batch until it is complete, cancelled, expired or failed. The lock `checking` keeps inputs from
        being checked side by side: a check holds 16 bytes of each `custom_id`.

        Raises APIError if the storage fails for another reason than that it is full.
        """
        try:
            if self._batch["status"] == "cancelling":
                raise _BatchEnded("cancelled")
            if self._batch["status"] == "validating":
                async with checking:
                    await self._validate()
            await self._answer_all()
            await self._end("completed")
        except InputError as error:
            await self._end("failed", error.errors)
        except _BatchEnded as ended:
            await self._end(str(ended))
        except APIError as error:
            if error.status != 507:
                raise
            _log.error("batch %s fails: %s", self._batch["id"], error.message)
            await self._end("failed", [_shown(error)])

    async def _validate(self) -> None:
        batch = self._batch

        def find_input(connection: Any) -> None:
            files.find(connection, batch["owner"], batch["input_file_id"])

        try:
            await self._storage.run(find_input)
        except APIError as error:
            if error.status != 404:
                raise
            raise InputError([_shown(error)]) from None
        total = await check_input(self._storage, batch["input_file_id"], batch["endpoint"], self._limits)

        def begin(connection: Any) -> None:
            if batches.find(connection, batch["owner"], batch["id"])["status"] == "cancelling":
                raise _BatchEnded("cancelled")
            until = batch["kept_until"]
            for field, suffix in (("output", "output"), ("errors_to", "error")):
                name = f"{batch['id']}_{suffix}.jsonl"
                batch[field] = files.begin(connection, batch["owner"], name, "batch_output", until)
            batch.update(status="in_progress", in_progress_at=int(time.time()))
            batch["request_counts"]["total"] = total
            batches.save(connection, batch)

        await self._storage.run(begin)

    async def _answer_all(self) -> None:
        """Answers the requests that have no answer yet. Raises _BatchEnded, InputError and APIError."""
        try:
            lines = read_lines(self._storage, self._batch["input_file_id"], self._limits)
            async with asyncio.TaskGroup() as tasks, aclosing(lines) as groups:
                await self._start_all(groups, tasks)
        except* (_BatchEnded, InputError, APIError) as group:
            raised = next(_leaves(group))
        else:
            return
        finally:
            self._free(self._running)
        raise raised

    async def _start_all(self, groups: AsyncGenerator[Lines, None], tasks: asyncio.TaskGroup) -> None:
        """Starts a task for each request that is not done, when it is the batch's turn. When the batch ends early,
        those that have been started are answered first."""
        count = 0
        async for lines in groups:
            count += len(lines)
            done = await self._done(lines)
            for number, line in lines:
                if number in done:
                    continue
                await self._places.take()
                self._running += 1
                if ended := await self._ended():
                    self._free(1)
                    await self._all_stored()
                    raise _BatchEnded(ended)
                request = read_line(line, (self._batch["endpoint"],))
                tasks.create_task(self._answer(number, request, tasks))
        if count < self._batch["request_counts"]["total"]:
            await self._all_stored()
            raise InputError([{"code": "file_deleted", "line": None, "message": _DELETED, "param": "input_file_id"}])

    async def _done(self, lines: Lines) -> set[int]:
        """The numbers of the lines that an earlier server has answered."""
        if not lines:
            return set()
        first, last = lines[0][0], lines[-1][0]

        def read(connection: Any) -> set[int]:
            found = (files.numbers(connection, self._batch[name], first, last) for name in ("output", "errors_to"))
            return set().union(*found)

        return await self._storage.run(read)

    async def _answer(self, number: int, request: BatchLine, tasks: asyncio.TaskGroup) -> None:
        batch, request_id = self._batch, secrets.token_hex(12)
        answer = await self._local.answer_later(request.url, bytes(request.body), request_id, batch["owner"])
        line = write_line(request.custom_id, request_id, answer)
        self._unstored.append((batch["output"] if answer.status == 200 else batch["errors_to"], number, line))
        if not self._storing:
            self._storing = True
            tasks.create_task(self._store())

    async def _store(self) -> None:
        """Stores the answers there are in one transaction, then those that were completed meanwhile. Requests that end
        in the same step of the engine have their answers in one transaction."""
        while self._unstored:
            group = self._take_group()
            await self._storage.run(partial(files.append_all, chunks=group))
            self._free(len(group))
        self._storing = False

    def _take_group(self) -> list[files.Chunk]:
        """Takes the oldest unstored answers: one, and more up to _GROUP_BYTES."""
        size = count = 0
        for _, _, line in self._unstored:
            size += len(line)
            if count and size > _GROUP_BYTES:
                break
            count += 1
        group, self._unstored = self._unstored[:count], self._unstored[count:]
        return group

    async def _all_stored(self) -> None:
        while self._running:
            self._stored.clear()
            await self._stored.wait()

    def _free(self, count: int) -> None:
        """Gives back the places of requests."""
        self._running -= count
        self._stored.set()
        self._places.give_back(count)

    async def _ended(self) -> str:
        """The status with which the batch ends now, or ""."""
        batch = self._batch
        if time.time() > batch["expires_at"]:
            return "expired"
        if not self.changed.is_set():
            return ""
        self.changed.clear()
        found = await self._storage.run(lambda connection: batches.find(connection, batch["owner"], batch["id"]))
        return "cancelled" if found["status"] == "cancelling" else ""

    async def _end(self, status: str, errors: list[dict[str, Any]] | None = None) -> None:
        """Shows the batch's files to its owner, and its status."""
        batch = self._batch

        def end(connection: Any) -> batches.Fields:
            latest, now = batches.find(connection, batch["owner"], batch["id"]), int(time.time())
            counts = dict(batch["request_counts"])
            fields = batch | {"status": status, f"{status}_at": now, "request_counts": counts}
            fields["cancelling_at"] = latest["cancelling_at"]
            if status == "completed":
                fields["finalizing_at"] = now
            if errors:
                fields["errors"] = {"object": "list", "data": errors}
            for source, suffix, count in (("output", "output", "completed"), ("errors_to", "error", "failed")):
                file_id = fields[source]
                if file_id is None:
                    continue
                counts[count] = files.count(connection, file_id)
                if counts[count]:
                    name = f"{batch['id']}_{suffix}.jsonl"
                    files.complete(connection, file_id, name, "batch_output", batch["kept_until"])
                    fields[f"{suffix}_file_id"] = file_id
                else:
                    files.remove(connection, file_id)
                fields[source] = None
            batches.save(connection, fields, ended=True)
            return fields

        fields = await self._storage.run(end, reserve=True)
        _log.info("batch %s: %s, %s", batch["id"], status, fields["request_counts"])


def _shown(error: APIError) -> dict[str, Any]:
    return {"code": error.code, "line": None, "message": error.message, "param": error.param}


def _leaves(group: BaseExceptionGroup[Any]) -> Iterator[Any]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
