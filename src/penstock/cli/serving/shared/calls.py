"""Calls of functions in the supervisor by an API process, over a channel of their connection."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.engine.link.mux import Mux
from penstock.engine.shared.orders import GONE
from penstock.frontend.errors import APIError
from penstock.messages import DeadlineExceeded, EngineError, QueueFull, RequestRejected
from penstock.messages.tensors import LoadFailed, NotReady

CHANNEL = 1 << 31  # versions of models have lower numbers
_log = logging.getLogger("penstock.serving")
# A subclass comes before its base.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (NotReady, LoadFailed, RequestRejected, DeadlineExceeded, EngineError)
}


class _Failure(msgspec.Struct, array_like=True):
    kind: str
    message: str
    status: int = 0  # of an APIError
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    @classmethod
    def of(cls, error: Exception) -> "_Failure":
        match error:
            case APIError():
                return cls("APIError", error.message, error.status, error.code, error.param, error.retry_after)
            case QueueFull():
                return cls("QueueFull", str(error), retry_after=error.retry_after)
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "")
        if not kind:
            _log.error("a call of an API process failed", exc_info=error)
        return cls(kind or "EngineError", str(error) or type(error).__name__)

    def error(self) -> Exception:
        match self.kind:
            case "APIError":
                where = {"param": self.param, "code": self.code, "retry_after": self.retry_after}
                return APIError(self.status, self.message, **where)  # type: ignore[arg-type]
            case "QueueFull":
                return QueueFull(self.message, self.retry_after or 0)
        return _KINDS[self.kind](self.message)


class _RemoteCall(msgspec.Struct, array_like=True):
    """A call. Serial 0: the result is of no interest. Without a name, the call with this serial is cancelled."""

    serial: int
    name: str
    arguments: tuple[Any, ...] = ()


class _Result(msgspec.Struct, array_like=True):
    serial: int
    value: Any
    last: bool = True
    failure: _Failure | None = None


_call, _result = msgspec.msgpack.Decoder(_RemoteCall), msgspec.msgpack.Decoder(_Result)
_encode = msgspec.msgpack.Encoder().encode


class CallServer:
    """The supervisor's end, for one API process."""

    def __init__(self, mux: Mux, functions: object) -> None:
        """`functions` has methods: coroutines, and generators whose values are sent one by one."""
        self._functions = functions
        self._channel = mux.open(CHANNEL, self._take)
        self._tasks: dict[object, asyncio.Task[None]] = {}

    def close(self) -> None:
        """Ends what runs, for a process that has ended."""
        self._channel.close()
        for task in self._tasks.values():
            task.cancel()

    def _take(self, frame: bytes) -> None:
        call = _call.decode(frame)
        if not call.name:
            if (running := self._tasks.get(call.serial)) is not None:
                running.cancel()
            return
        key = call.serial or object()
        task = self._tasks[key] = asyncio.create_task(self._run(call))
        task.add_done_callback(lambda _: self._tasks.pop(key))

    async def _run(self, call: _RemoteCall) -> None:
        result = _Result(call.serial, None)
        try:
            made = getattr(self._functions, call.name)(*call.arguments)
            if isinstance(made, AsyncGenerator):
                async with aclosing(made) as values:
                    async for value in values:
                        self._channel.send(_encode(_Result(call.serial, value, last=False)))
            else:
                result.value = await made
        except Exception as error:
            result.failure = _Failure.of(error)
        if call.serial:
            self._channel.send(_encode(result))


class CallClient:
    """An API process's end."""

    def __init__(self, mux: Mux) -> None:
        self._channel = mux.open(CHANNEL, self._take, self._lost)
        self._serials = itertools.count(1)
        self._open: dict[int, asyncio.Queue[_Result]] = {}

    async def call(self, name: str, *arguments: Any) -> Any:
        """Returns what a function returns. Raises what it raises, and EngineError if the supervisor has ended."""
        async with aclosing(self.stream(name, *arguments)) as values:
            return await anext(values)

    async def stream(self, name: str, *arguments: Any) -> AsyncGenerator[Any, None]:
        """Yields the values of a generator, and then None; or what a function returns. Raises as `call`."""
        serial = next(self._serials)
        results = self._open[serial] = asyncio.Queue()
        self._channel.send(_encode(_RemoteCall(serial, name, arguments)))
        last = False
        try:
            while not last:
                result = await results.get()
                last = result.last
                if result.failure is not None:
                    raise result.failure.error()
                yield result.value
        finally:
            del self._open[serial]
            if not last:
                self._channel.send(_encode(_RemoteCall(serial, "")))

    def notify(self, name: str, *arguments: Any) -> None:
        """Calls a function whose result is of no interest."""
        self._channel.send(_encode(_RemoteCall(0, name, arguments)))

    def _take(self, frame: bytes) -> None:
        result = _result.decode(frame)
        if (results := self._open.get(result.serial)) is not None:
            results.put_nowait(result)

    def _lost(self) -> None:
        for serial, results in self._open.items():
            results.put_nowait(_Result(serial, None, True, _Failure("EngineError", GONE)))
