"""Messages between a client and its engine: msgpack of tagged structs, one event for each step.

Commands go to the engine, events come from it. Every command is decoded against its type, so that a value of a wrong
type rejects its request and never reaches the scheduler or the model.
"""

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from penstock.messages import (
    BlockChanges,
    ControlAnswer,
    ControlMessage,
    DeadlineExceeded,
    EndsEngines,
    EngineError,
    EngineInfo,
    EngineState,
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
    sent: float = 0.0  # on the clock of the request's times


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
    """Answered by a ControlReply with the serial."""

    serial: int
    message: ControlMessage


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request of an API process to its supervisor. The answer is a ControlReply with a text. An API process
    that does not wait for it sends the serial 0."""

    serial: int
    message: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the current step."""

    reason: str


class Counted(msgspec.Struct, frozen=True, tag=True):
    """The counts of an API process, as JSON: the answer to the order `count`."""

    counts: bytes


Command = Add | Finish | Abort | Control | Ask | Stop | Counted
# Why a request is not served: itself, its prompt that has ended two engines, the queue, its deadline, or the engine.
Cause = Literal["request", "ends engines", "queue", "deadline", "engine"]
# A subclass comes before its base.
_ERRORS: Mapping[Cause, type[Exception]] = {
    "queue": QueueFull,
    "ends engines": EndsEngines,
    "request": RequestRejected,
    "deadline": DeadlineExceeded,
    "engine": EngineError,
}


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
    answer: ControlAnswer | str = ""
    error: str = ""
    cause: Cause = "request"  # of the error

    def settle(self, reply: "asyncio.Future[Any] | None") -> None:
        """Set the result of the future that awaits the reply, or the error; nothing if its caller has gone."""
        if reply is None or reply.done():
            return
        if self.error:
            reply.set_exception(_ERRORS[self.cause](self.error))
        else:
            reply.set_result(self.answer)


Refused = Rejected | ControlReply  # the answer to a command that cannot be decoded


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
    blocks: list[BlockChanges] = []  # of the prefix cache, after `WatchBlocks`


class SharedState(msgspec.Struct, frozen=True, tag=True):
    """The engine that API processes share, at first and whenever it changes."""

    info: EngineInfo
    stats: EngineStats
    state: EngineState
    max_waiting: int  # the limits of its queue
    max_waiting_tokens: int


class Order(msgspec.Struct, frozen=True, tag=True):
    """An order to an API process: `drain`, `hurry`, `read_certificate`, `read_keys`, `run_batches`, `count`, or in
    a reload `hold SERIAL`, `release`, `exchange`, `withdraw`."""

    name: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A new version of the model, which an API process shall load. Its engine is on the channel `version`."""

    serial: int  # of the reply
    version: int
    settings: bytes  # JSON


Event = Ready | Ended | Step | SharedState | Order | Offer

LINK_VERSION = 2  # of these messages between machines. Another one for a change that an older program cannot read.

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


def decode_command(frame: bytes) -> Command | Refused | None:
    """Decode a command. Returns the answer to one that has a value of a wrong type, and logs anything else."""
    try:
        command: Command = _commands.decode(frame)
        return command
    except msgspec.DecodeError as error:
        refused = _refused(frame, error)
        if refused is None:
            log.error("ignored %d bytes that are no command: %s", len(frame), error)
        return refused


def _refused(frame: bytes, error: msgspec.DecodeError) -> Refused | None:
    """Return the answer to a command that cannot be decoded, if its sender waits for one."""
    with contextlib.suppress(msgspec.DecodeError):
        match msgspec.msgpack.decode(frame):
            case {"type": "Add", "request": {"request_id": str(request_id)}}:
                return Rejected(request_id, f"invalid request: {error}")
            case {"type": "Control", "serial": int(serial)}:
                return ControlReply(serial, error=f"unknown control message: {error}")
    return None
