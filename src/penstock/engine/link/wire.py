"""Messages between a client and its engine: msgpack of tagged structs, one event for each step.

Commands go to the engine, events come from it. Every command is decoded against its type, so that a value of a wrong
type rejects its request and never reaches the scheduler or the model.
"""

import contextlib
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.messages import (
    DeadlineExceeded,
    EndsEngines,
    EngineError,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    QueueFull,
    RequestRejected,
    TokenDelta,
)

if TYPE_CHECKING:  # the engine's process needs no event loop
    import asyncio


class Add(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Finish(msgspec.Struct, frozen=True, tag=True):
    """End a choice and keep its first `keep` output tokens."""

    request_id: str
    choice: int
    reason: FinishReason
    keep: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End every choice of a request. Always answered in `Step.aborted`, whether the request was known or not."""

    request_id: str


class Control(msgspec.Struct, frozen=True, tag=True):
    serial: int
    message: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the current step."""

    reason: str


class Counted(msgspec.Struct, frozen=True, tag=True):
    """The counts of an API process, as JSON: the answer to the order `count`."""

    counts: bytes


Command = Add | Finish | Abort | Control | Stop | Counted
# Why a request is not served: itself, its prompt that has ended two engines, the queue, its deadline, or the engine.
Cause = Literal["request", "ends engines", "queue", "deadline", "engine"]
# A subclass comes before its base.
_ERRORS: Mapping[Cause, type[Exception]] = MappingProxyType(
    {
        "queue": QueueFull,
        "ends engines": EndsEngines,
        "request": RequestRejected,
        "deadline": DeadlineExceeded,
        "engine": EngineError,
    }
)


class Rejected(msgspec.Struct, frozen=True):
    """The answer to an Add that cannot be served; nothing else of that request follows."""

    request_id: str
    message: str
    cause: Cause = "request"
    retry_after: int = 0  # seconds, if the queue is full

    @classmethod
    def of(cls, request_id: str, error: Exception) -> "Rejected":
        """Returns the answer for a request that ends with `error`."""
        cause: Cause = next((cause for cause, kind in _ERRORS.items() if isinstance(error, kind)), "request")
        return cls(request_id, str(error), cause, error.retry_after if isinstance(error, QueueFull) else 0)

    def error(self) -> Exception:
        """Returns the exception for the request's consumer."""
        if self.cause == "queue":
            return QueueFull(self.message, self.retry_after)
        return _ERRORS[self.cause](self.message)


class ControlReply(msgspec.Struct, frozen=True):
    serial: int
    text: str = ""
    error: str = ""
    cause: Cause = "request"  # of the error

    def settle(self, reply: "asyncio.Future[str] | None") -> None:
        """Set the result of the future that awaits the reply, or the error; nothing if its caller has gone."""
        if reply is None or reply.done():
            return
        if self.error:
            reply.set_exception(_ERRORS[self.cause](self.error))
        else:
            reply.set_result(self.text)


class Ready(msgspec.Struct, frozen=True, tag=True):
    info: EngineInfo
    stats: EngineStats


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine ends, or could not start. Nothing follows."""

    reason: str


class Step(msgspec.Struct, tag=True, omit_defaults=True):
    """Everything new after a step, after commands that needed no step, or before the first step of a request."""

    stats: EngineStats | None = None  # None: those sent before are recent
    deltas: list[TokenDelta] = []
    rejected: list[Rejected] = []
    aborted: list[str] = []
    replies: list[ControlReply] = []
    begun: list[str] = []  # requests that the next step computes for the first time


class EngineState(msgspec.Struct, frozen=True, tag=True):
    """The engine that API processes share, at first and whenever it changes."""

    info: EngineInfo
    stats: EngineStats
    restarting: bool
    asleep: bool
    restarts: int
    max_waiting: int  # the limits of its queue
    max_waiting_tokens: int


class Order(msgspec.Struct, frozen=True, tag=True):
    """An order to an API process: `drain`, `hurry`, `read_certificate`, `run_batches`, `count`, or in a reload
    `hold SERIAL`, `release`, `exchange`, `withdraw`."""

    name: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A new version of the model, which an API process shall load. Its engine is on the channel `version`."""

    serial: int  # of the reply
    version: int
    settings: bytes  # JSON


Event = Ready | Ended | Step | EngineState | Order | Offer

log = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """Encode a message. Raises ValueError, TypeError or OverflowError for a value that msgpack cannot hold."""
    return _encoder.encode(message)


def decode_event(frame: bytes) -> Event:
    """Decode an event. Raises msgspec.DecodeError for anything else."""
    event: Event = _events.decode(frame)
    return event


def decode_command(frame: bytes) -> Command | Rejected | None:
    """Decode a command. Returns a Rejected for a request with a value of a wrong type, and logs anything else."""
    try:
        command: Command = _commands.decode(frame)
        return command
    except msgspec.DecodeError as error:
        request_id = _request_id(frame)
        if request_id is not None:
            return Rejected(request_id, f"invalid request: {error}")
        log.error("ignored %d bytes that are no command: %s", len(frame), error)
    return None


def _request_id(frame: bytes) -> str | None:
    """Return the id of a request whose other values may be of wrong types."""
    with contextlib.suppress(msgspec.DecodeError):
        match msgspec.msgpack.decode(frame):
            case {"type": "Add", "request": {"request_id": str(request_id)}}:
                return request_id
    return None
