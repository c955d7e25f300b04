"""The messages between a supervisor and an API process besides those for an engine: orders, and the process's requests.

They go over the channel `ORDERS`, which is open for the life of the process. Each version of the model has a channel of
its own, see `hub`.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from penstock.engine.link.mux import Mux
from penstock.engine.link.wire import (
    Ask,
    ControlReply,
    Counted,
    Offer,
    Order,
    Step,
    decode_command,
    decode_event,
    encode,
)
from penstock.messages import ControlAnswer, EngineError
from penstock.tasks import spawn

ORDERS = 0  # the channel; versions have higher numbers
REST_SECONDS = 1.0  # to read what a process has sent before it ended
GONE = "the process that has the engine has ended"


class ApiLink:
    """The supervisor's end, for one API process."""

    def __init__(self, mux: Mux, answer: Callable[[str], Awaitable[str]]) -> None:
        """`answer` returns the reply to a request of the process. Raises ValueError or EngineError."""
        self._over = asyncio.Event()
        self._channel = mux.open(ORDERS, self._take, self._over.set)
        self._answer = answer
        self._counts: asyncio.Future[bytes] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, order: Order | Offer) -> None:
        self._channel.send(encode(order))

    async def count(self) -> bytes:
        """Return what the process has counted. The caller bounds the time."""
        if self._counts is None or self._counts.done():
            self._counts = asyncio.get_running_loop().create_future()
            self.send(Order("count"))
        return await asyncio.shield(self._counts)

    async def read_rest(self) -> None:
        """Take all that a process sent before it ended, its last rows of the ledger among it."""
        with suppress(TimeoutError):  # a process that it started could hold its socket open
            await asyncio.wait_for(self._over.wait(), REST_SECONDS)
        await asyncio.sleep(0)  # all is begun: each message has a task

    def close(self) -> None:
        """Note that the process has ended. May be called twice."""
        self._channel.close()
        for task in self._tasks:
            task.cancel()
        if self._counts is not None and not self._counts.done():
            self._counts.set_exception(EngineError("the API process has ended"))
            self._counts.exception()  # the caller may have been cancelled

    def _take(self, frame: bytes) -> None:
        match decode_command(frame):
            case Ask() as request:
                spawn(self._tasks, self._reply(request))
            case Counted(counts):
                if self._counts is not None and not self._counts.done():
                    self._counts.set_result(counts)

    async def _reply(self, request: Ask) -> None:
        reply = await answered(request.serial, self._answer(request.message))
        self._channel.send(encode(Step(replies=[reply])))


class SupervisorLink:
    """An API process's end."""

    def __init__(self, mux: Mux, on_order: Callable[[Order | Offer], object]) -> None:
        self._channel = mux.open(ORDERS, self._take, self._lost)
        self._on_order = on_order
        self._serials = itertools.count(1)
        self._replies: dict[int, asyncio.Future[str]] = {}

    def ask(self, message: str) -> Awaitable[str]:
        """Send a message, and return what waits for the supervisor's reply. That raises RequestRejected, and
        EngineError if the supervisor has ended."""
        serial = next(self._serials)
        reply = self._replies[serial] = asyncio.get_running_loop().create_future()
        self._channel.send(encode(Ask(serial, message)))
        return reply

    def notify(self, message: str) -> None:
        """Send what has no reply of interest."""
        self._channel.send(encode(Ask(0, message)))

    def send_counts(self, counts: bytes) -> None:
        """Answer the order `count`."""
        self._channel.send(encode(Counted(counts)))

    def _take(self, frame: bytes) -> None:
        try:
            event = decode_event(frame)
        except msgspec.DecodeError:
            self._lost()
            return
        match event:
            case Order() | Offer():
                self._on_order(event)
            case Step():
                for reply in event.replies:
                    reply.settle(self._replies.pop(reply.serial, None))

    def _lost(self) -> None:
        for future in self._replies.values():
            if not future.done():
                future.set_exception(EngineError(GONE))
        self._replies.clear()


async def answered(serial: int, answer: Awaitable[ControlAnswer | str]) -> ControlReply:
    """Return the reply with an answer, or with the error that is raised instead."""
    try:
        return ControlReply(serial, await answer)
    except (ValueError, EngineError) as error:
        return ControlReply(serial, "", str(error), "engine" if isinstance(error, EngineError) else "request")
