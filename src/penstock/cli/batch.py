"""Implements `penstock batch`: answers the requests of a file, and goes on where an earlier run ended."""

import asyncio
import fcntl
import os
import secrets
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from penstock.cli.options import Flags
from penstock.frontend.jobs.lines import PATHS, AnswerLine, BatchLine, read_line, write_line
from penstock.frontend.limits import RequestLimits
from penstock.frontend.local import LocalRequests
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.versions.serving import Serving
from penstock.observe.metrics import Metrics
from penstock.observe.reporting import reporting
from penstock.prepare.engine import own_engine
from penstock.prepare.files import check_file
from penstock.prepare.model import PreparedModel, find_model, prepare_found
from penstock.prepare.served import served_model

MAX_REQUESTS = 10_000_000
MAX_LINE = 16 << 20  # bytes
GO_ON = "the same command goes on from here"
SYNC_SECONDS = 1.0  # between writes to the disk itself
INTERRUPTED = 130  # exit status


@dataclass
class _BatchRun:
    """A batch: its files, and what is done."""

    requests: Path
    total: int
    answers: FileIO
    done: set[str]  # custom ids that an earlier run has answered
    answered: int = 0  # by this run
    statuses: Counter[int] = field(default_factory=Counter)
    synced: float = 0.0

    def pending(self) -> Iterator[BatchLine]:
        """Yields the requests that have no answer yet, in the order of the file."""
        for _, line in _lines(self.requests):
            request = read_line(line, PATHS)
            if request.custom_id not in self.done:
                yield request

    def write(self, line: bytes, status: int) -> None:
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self.answers.write(rest) :]
        except OSError as error:
            raise OSError(f"{self.answers.name} cannot be written: {error.strerror}; {GO_ON}") from None
        self.answered += 1
        self.statuses[status] += 1
        if time.monotonic() - self.synced > SYNC_SECONDS:
            os.fdatasync(self.answers.fileno())
            self.synced = time.monotonic()


def batch(requests: str, answers: str, model: str | None, flags: Flags) -> int:
    """Answers every request of a file. Returns the exit status."""
    check_file("ANSWERS", answers)
    if Path(answers).exists() and Path(requests).exists() and Path(answers).samefile(requests):
        raise ValueError(f"REQUESTS and ANSWERS are both {requests}; name another file for the answers")
    prepared = prepare_found(find_model(model, flags))
    limits = RequestLimits.of(prepared.resolved.server)
    with reporting(f"checking {requests}"):
        ids = _check(Path(requests))
    with _open_answers(Path(answers)) as file:
        done = _answered(file, ids, answers)
        job = _BatchRun(Path(requests), len(ids), file, done)
        if done:
            rest = "nothing is left to do" if len(done) == len(ids) else "going on with the others"
            print(f"{answers} has {len(done):,} of {len(ids):,} answers: {rest}", file=sys.stderr)
        if len(done) == len(ids):
            return 0
        began = time.monotonic()
        try:
            asyncio.run(_run(job, prepared, limits))
        except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, SIGTERM
            print(f"interrupted: {_summary(job, began)}; {GO_ON}", file=sys.stderr)
            return INTERRUPTED
        finally:
            os.fdatasync(file.fileno())
    print(_summary(job, began), file=sys.stderr)
    return 0


def _check(path: Path) -> set[str]:
    """Returns the custom ids of a file, all of whose lines have been checked. Raises ValueError that names the line."""
    ids: set[str] = set()
    for number, line in _lines(path):
        try:
            custom_id = read_line(line, PATHS).custom_id
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        if custom_id in ids:
            raise ValueError(f"{path}, line {number}: custom_id {custom_id[:100]!r} was used before; make it unique")
        if len(ids) >= MAX_REQUESTS:
            raise ValueError(f"{path} has more than {MAX_REQUESTS:,} requests, the limit; divide it")
        ids.add(custom_id)
    if not ids:
        raise ValueError(f"{path} has no requests; write one JSON object a line")
    return ids


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not empty, with their numbers. Raises ValueError."""
    try:
        if not path.is_file():
            raise ValueError(f"REQUESTS is {str(path)!r}, which is not a file; name a file of JSON lines")
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise ValueError(
                        f"{path}, line {number}: it has more than {MAX_LINE} bytes, the limit; shorten the request"
                    )
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


@contextmanager
def _open_answers(path: Path) -> Iterator[FileIO]:
    """Opens the file of answers for this process alone. Raises ValueError if another run writes it."""
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another penstock batch writes {path}; wait for it, or name another file") from None
        yield file


def _answered(file: FileIO, ids: set[str], name: str) -> set[str]:
    """Returns the custom ids whose answers are in the file. A last line that was not written to its end is removed.

    Raises ValueError if the file has something else.
    """
    decoder = msgspec.json.Decoder(AnswerLine)
    found: set[str] = set()
    end = 0
    with open(file.fileno(), "rb", closefd=False) as lines:  # `file` has no buffer: it would read each byte by itself
        lines.seek(0)
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break
            try:
                custom_id = decoder.decode(line).custom_id
            except msgspec.DecodeError:
                raise ValueError(f"{name}, line {number} is not an answer of a batch; name another file") from None
            if custom_id not in ids or custom_id in found:
                raise ValueError(
                    f"{name}, line {number} answers {custom_id[:100]!r}, which REQUESTS does not ask; name another file"
                )
            found.add(custom_id)
            end += len(line)
    file.truncate(end)
    file.seek(0, os.SEEK_END)
    return found


async def _run(job: _BatchRun, prepared: PreparedModel, limits: RequestLimits) -> None:
    """Answers the pending requests, as many at a time as the engine runs and some that wait."""
    stop = asyncio.current_task()
    assert stop is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.cancel)
    engine = msgspec.structs.replace(prepared.resolved.engine, log_level="warning")
    with reporting(f"starting the engine for {engine.name}") as say:
        async with own_engine(engine, resumes=True) as client:
            models = ModelRegistry(Serving(served_model(prepared.answers, client), Metrics(CollectorRegistry())))
            local = LocalRequests(models, limits, prepared.resolved.server.seed)
            await _answer_all(job, local, local.capacity(), say)


async def _answer_all(job: _BatchRun, local: LocalRequests, at_once: int, say: Callable[[str], None]) -> None:
    pending = job.pending()

    def show() -> None:
        say(f"answered {len(job.done) + job.answered:,} of {job.total:,}")

    async def work() -> None:
        for request in pending:
            request_id = secrets.token_hex(12)
            answer = await local.answer_later(request.url, bytes(request.body), request_id)
            job.write(write_line(request.custom_id, request_id, answer), answer.status)
            show()

    show()
    workers = [asyncio.create_task(work()) for _ in range(min(at_once, job.total))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _summary(job: _BatchRun, began: float) -> str:
    seconds = time.monotonic() - began
    refused = job.answered - job.statuses[200]
    errors = f", {refused:,} of them with an error" if refused else ""
    requests = "1 request" if job.answered == 1 else f"{job.answered:,} requests"
    return f"answered {requests}{errors} in {seconds:.1f} s"
