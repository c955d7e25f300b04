"""The methods of the gRPC services. Each is a translation of one of KServe's HTTP routes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc
import grpc.aio
import orjson
from google.protobuf import json_format

from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Message
from penstock.frontend.http.sse import STREAM_TYPE, sse_data
from penstock.frontend.kserve.grpc.calls import Calls, HTTPAnswer, fail
from penstock.frontend.kserve.grpc.messages import (
    HEALTH,
    INFERENCE,
    MESSAGES,
    NOT_SERVING,
    SERVICE_UNKNOWN,
    SERVING,
)
from penstock.frontend.kserve.grpc.tensors import InferInputs, empty_answer, infer_answer

_LOOK_SECONDS = 0.5  # between looks at the health of a server that is watched


class _Simple(NamedTuple):
    """A method without inference. `path` is of the HTTP route; {} is the place of the model's path."""

    request: str
    answer: str
    path: str
    posts: bool = False
    flag: str = ""  # the field of the answer that says whether the route's status is 200; "": it has the JSON's fields


_SIMPLE = {
    "ServerLive": _Simple("Empty", "Live", "/v2/health/live", flag="live"),
    "ServerReady": _Simple("Empty", "Ready", "/v2/health/ready", flag="ready"),
    "ModelReady": _Simple("ModelName", "Ready", "{}/ready", flag="ready"),
    "ServerMetadata": _Simple("Empty", "Server", "/v2"),
    "ModelMetadata": _Simple("ModelName", "Model", "{}"),
    "ModelConfig": _Simple("ModelName", "ConfigAnswer", "{}/config"),
    "ModelStatistics": _Simple("ModelName", "Statistics", "{}/stats"),
    "RepositoryIndex": _Simple("Repository", "Index", "/v2/repository/index", posts=True),
    "RepositoryModelLoad": _Simple("LoadedModel", "Empty", "/v2/repository/models/{}/load", posts=True),
    "RepositoryModelUnload": _Simple("LoadedModel", "Empty", "/v2/repository/models/{}/unload", posts=True),
}
_WRAPPED = {"ModelConfig": "config", "RepositoryIndex": "models"}  # the field that holds the route's JSON


def handlers(calls: Calls, most_at_once: int) -> list[grpc.GenericRpcHandler]:
    """The handlers of the services. `most_at_once`: requests of one stream that run at a time."""
    infer = _Infer(calls, most_at_once)
    health = _Health(calls)
    methods = {name: _unary(_simple(calls, name, method), method.request) for name, method in _SIMPLE.items()}
    methods["ModelInfer"] = _unary(infer.whole, "InferRequest")
    methods["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        infer.stream, MESSAGES["InferRequest"].FromString, _encode
    )
    of_health = {
        "Check": _unary(health.check, "HealthRequest"),
        "Watch": grpc.unary_stream_rpc_method_handler(health.watch, MESSAGES["HealthRequest"].FromString, _encode),
    }
    return [
        grpc.method_handlers_generic_handler(INFERENCE, methods),
        grpc.method_handlers_generic_handler(HEALTH, of_health),
    ]


class _Infer:
    def __init__(self, calls: Calls, most_at_once: int) -> None:
        self._calls = calls
        self._most_at_once = most_at_once

    async def whole(self, request: Any, context: Any) -> Any:
        """ModelInfer: one answer with the whole text."""
        try:
            body = InferInputs(request).body()
        except APIError as error:
            await fail(context, error)
        else:
            return infer_answer(await self._calls.answer(context, _model(request) + "/infer", body))

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        """ModelStreamInfer: requests run at the same time; each has any number of answers, in order. A request that
        fails does not end the others. When too many run, the next ones wait, and then the client does."""
        turns = asyncio.Semaphore(self._most_at_once)
        writing = asyncio.Lock()  # a call has one write at a time

        async def write(answer: Any) -> None:
            async with writing:
                with contextlib.suppress(grpc.aio.BaseError):  # the client has gone: this call is cancelled next
                    await context.write(answer)

        async def run(request: Any) -> None:
            try:
                await self._answer(request, context, write)
            finally:
                turns.release()

        async with asyncio.TaskGroup() as tasks:
            async for request in requests:
                await turns.acquire()
                tasks.create_task(run(request))

    async def _answer(self, request: Any, context: Any, write: Callable[[Any], Awaitable[None]]) -> None:
        """Sends the answers to one request of a stream."""
        try:
            inputs = InferInputs(request)
            body = inputs.body()
        except APIError as error:
            await write(_stream_error(request, error.message))
            return
        if inputs.streams:
            reply = _StreamedReply(request, write)
            await self._calls.send(context, _model(request) + "/infer_stream", body, reply.send)
            failed = await reply.end()
            if inputs.empty_final and not failed:
                await write(MESSAGES["StreamAnswer"](infer_response=empty_answer(request)))
            return
        answer = await self._calls.ask(context, _model(request) + "/infer", body)
        if answer.status >= 400:
            await write(_stream_error(request, answer.message))
        else:
            await write(MESSAGES["StreamAnswer"](infer_response=infer_answer(answer.body, final=True)))


class _StreamedReply:
    """Sends the events of an HTTP answer as messages."""

    def __init__(self, request: Any, write: Callable[[Any], Awaitable[None]]) -> None:
        self._request = request
        self._write = write
        self._start: Message = {}
        self._parts: list[bytes] = []  # of an answer that is no stream: an error
        self._failed = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        elif (b"content-type", STREAM_TYPE) not in self._start["headers"]:
            self._parts.append(message.get("body", b""))
        else:
            for data in sse_data(message.get("body", b"")):
                if data.startswith(b'{"error":'):
                    self._failed = True
                    await self._write(_stream_error(self._request, str(orjson.loads(data)["error"])))
                else:
                    await self._write(MESSAGES["StreamAnswer"](infer_response=infer_answer(data, final=False)))

    async def end(self) -> bool:
        """Sends the error if there was one. Returns whether the request failed."""
        if self._parts:
            self._failed = True
            answer = HTTPAnswer(self._start["status"], {}, b"".join(self._parts))
            await self._write(_stream_error(self._request, answer.message))
        return self._failed


class _Health:
    """gRPC's own health service. It needs no key, as the HTTP routes for health."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def check(self, request: Any, context: Any) -> Any:
        if request.service not in ("", INFERENCE, HEALTH):
            message = f"there is no service {request.service[:100]!r}; the services are {INFERENCE} and {HEALTH}"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return await self._answer(context)

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yields the status now, and whenever it changes."""
        if request.service not in ("", INFERENCE, HEALTH):
            yield MESSAGES["HealthAnswer"](status=SERVICE_UNKNOWN)
            return
        last = None
        while True:
            answer = await self._answer(context)
            if answer != last:
                last = answer
                yield answer
            await asyncio.sleep(_LOOK_SECONDS)

    async def _answer(self, context: Any) -> Any:
        ready = (await self._calls.ask(context, "/v2/health/ready")).status == 200
        return MESSAGES["HealthAnswer"](status=SERVING if ready else NOT_SERVING)


def _simple(calls: Calls, name: str, method: _Simple) -> Callable[[Any, Any], Awaitable[Any]]:
    """The handler of a method without inference."""

    async def handle(request: Any, context: Any) -> Any:
        path = method.path
        if "{}" in path:
            loaded = method.request == "LoadedModel"
            path = path.format(request.model_name if loaded else _versioned(request.name, request.version))
        answer = await calls.ask(context, path, b"{}" if method.posts else None)
        if method.flag and answer.status in (200, 404, 503):
            return MESSAGES[method.answer](**{method.flag: answer.status == 200})
        if answer.status >= 400:
            await fail(context, answer)
        fields = orjson.loads(answer.body) if answer.body else {}
        if name in _WRAPPED:
            fields = {_WRAPPED[name]: fields}
        return json_format.ParseDict(fields, MESSAGES[method.answer]())

    return handle


def _unary(handle: Callable[[Any, Any], Awaitable[Any]], request: str) -> Any:
    return grpc.unary_unary_rpc_method_handler(handle, MESSAGES[request].FromString, _encode)


def _encode(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded


def _model(request: Any) -> str:
    return _versioned(request.model_name, request.model_version)


def _versioned(model: str, version: str) -> str:
    return f"/v2/models/{model}" + (f"/versions/{version}" if version else "")


def _stream_error(request: Any, message: str) -> Any:
    """The message for a request that failed. It has the request's id, for clients that read it."""
    return MESSAGES["StreamAnswer"](error_message=message, infer_response=MESSAGES["InferAnswer"](id=request.id))
