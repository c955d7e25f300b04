"""Everything that happens to a scheduler, as events. The same events give the same plans (see `replay`)."""

from collections.abc import Iterable, Iterator
from typing import IO, Protocol

import msgspec

from penstock.messages import Capacity, FinishReason, GenerateRequest, StepResult
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


class Planned(msgspec.Struct, frozen=True, tag="plan"):
    now: float


class Applied(msgspec.Struct, frozen=True, tag="apply"):
    result: StepResult
    now: float


class CacheReset(msgspec.Struct, frozen=True, tag="reset"):
    pass


Event = Started | Added | Finished | Aborted | Planned | Applied | CacheReset


class EventLog(Protocol):
    """Where events go. A list is one."""

    def append(self, event: Event, /) -> None: ...


class EventFile:
    """A log of one JSON object a line, written as it happens."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._encode = msgspec.json.Encoder().encode

    def append(self, event: Event, /) -> None:
        self._file.write(self._encode(event) + b"\n")


def read_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events of a log's lines. msgspec.DecodeError or ValidationError where a line is not one."""
    decode = msgspec.json.Decoder(Event).decode
    for line in lines:
        yield decode(line)
