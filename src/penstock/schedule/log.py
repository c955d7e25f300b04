"""Everything that happens to a scheduler, as events. The same events give the same plans (see `replay`)."""

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import IO, Protocol

import msgspec

from penstock.messages import Capacity, FinishReason, GenerateRequest, StepPlan, StepResult
from penstock.schedule.config import SchedulerConfig


class Started(msgspec.Struct, frozen=True, tag="start"):
    config: SchedulerConfig
    capacity: Capacity
    incarnation: int


class Added(msgspec.Struct, frozen=True, tag="add"):
    """Only requests that were not refused."""

    request: GenerateRequest
    now: float


class Finished(msgspec.Struct, frozen=True, tag="finish"):
    request_id: str
    choice: int
    reason: FinishReason
    keep: int
    now: float


class Aborted(msgspec.Struct, frozen=True, tag="abort"):
    request_id: str
    now: float


class Dropped(msgspec.Struct, frozen=True, tag="drop"):
    """Requests that would miss their deadline were dropped. Not there when there were none."""

    now: float


class Planned(msgspec.Struct, frozen=True, tag="plan"):
    now: float


class Submitted(msgspec.Struct, frozen=True, tag="submit"):
    """The plan that the last Planned made. Not there when there was nothing to do."""

    plan_id: int
    digest: str  # see plan_digest


class Applied(msgspec.Struct, frozen=True, tag="apply"):
    result: StepResult
    now: float


class StartedOver(msgspec.Struct, frozen=True, tag="start_over"):
    """The executor lacked memory for the newest outstanding plan, and has forgotten every sequence."""

    error: str
    now: float


class StepsLimited(msgspec.Struct, frozen=True, tag="limit_steps"):
    seconds: float


class Resized(msgspec.Struct, frozen=True, tag="resize"):
    limits: tuple[int, ...]


class CacheReset(msgspec.Struct, frozen=True, tag="reset"):
    pass


class Lent(msgspec.Struct, frozen=True, tag="lend"):
    """See BlockLeases, also for the events below."""

    keys: tuple[bytes, ...]


class Reserved(msgspec.Struct, frozen=True, tag="reserve"):
    pass


class Imported(msgspec.Struct, frozen=True, tag="import"):
    block: int
    key: bytes


class Returned(msgspec.Struct, frozen=True, tag="return"):
    blocks: tuple[int, ...]


Event = (
    Started
    | Added
    | Finished
    | Aborted
    | Dropped
    | Planned
    | Submitted
    | Applied
    | StartedOver
    | CacheReset
    | Resized
    | StepsLimited
    | Lent
    | Reserved
    | Imported
    | Returned
)


class EventLog(Protocol):
    """Takes events. A list is one."""

    def append(self, event: Event, /) -> None: ...


class EventFile:
    """Writes one JSON object a line. It holds the token ids of prompts and outputs."""

    def __init__(self, file: IO[bytes], failed: Callable[[OSError], None]) -> None:
        """Open `file` without a buffer to have every event on disk when the process dies. If a write fails, as on a
        full disk, `failed` is called and the log ends there. The scheduler goes on."""
        self._file: IO[bytes] | None = file
        self._failed = failed
        self._encode = msgspec.json.Encoder().encode

    def append(self, event: Event, /) -> None:
        if self._file is None:
            return
        try:
            self._file.write(self._encode(event) + b"\n")
        except OSError as error:
            self._file = None
            self._failed(error)


def read_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events of a log's lines. Raises ValueError with the number of a line that is no event."""
    decode = msgspec.json.Decoder(Event).decode
    for number, line in enumerate(lines, 1):
        try:
            event: Event = decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"line {number} of the event log is no event: {error}") from error
        yield event


def plan_digest(plan: StepPlan) -> str:
    """Return 32 hex digits that differ for different plans."""
    return sha256(msgspec.msgpack.encode(plan)).hexdigest()[:32]
