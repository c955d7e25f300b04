"""The methods of the gRPC services. Each is a translation of one of KServe's HTTP routes."""

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio
import orjson
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Message
from penstock.frontend.http.buffers import HeldBytes
from penstock.frontend.http.sse import STREAM_TYPE, sse_data
from penstock.frontend.kserve.grpc.calls import Calls, HTTPAnswer, fail
from penstock.frontend.kserve.grpc.messages import (
    HEALTH,
    INFERENCE,
    MESSAGES,
    NOT_SERVING,
    SERVICE_UNKNOWN,
    SERVING,
    encode,
)
from penstock.frontend.kserve.grpc.parts import check_parts
from penstock.frontend.kserve.grpc.tensors import InferInputs, empty_answer, infer_answer, stream_answer

_MAPS = ("input_map", "output_map", "priority_queue_policy")  # of a configuration
_LOOK_SECONDS = 0.5  # between looks at the health of a server that is watched
_MAX_WATCHES = 64  # of the server's health at a time; they need no key
_MAX_NAME_CHARS = 4096  # of a model, which may be the path of a folder
_MAX_ID_CHARS = 1024  # of a request's id in the message of its error

if TYPE_CHECKING:
    from penstock.frontend.kserve.grpc.one_shot import TensorCalls

# Returns the answer to a message, with the call's context and the count of the answer's bytes.
Handle = Callable[[Any, Any, HeldBytes], Awaitable[Any]]


class _Simple(NamedTuple):
    """A method without inference. `path` is of the HTTP route; {} is the place of the model's path."""

    request: str
    answer: str
    path: str
    posts: bool = False
    is_open: bool = False  # it needs no key
    flag: str = ""  # the field of the answer that says whether the route's status is 200; "": it has the JSON's fields


_SIMPLE = {
    "ServerLive": _Simple("Empty", "Live", "/v2/health/live", is_open=True, flag="live"),
    "ServerReady": _Simple("Empty", "Ready", "/v2/health/ready", is_open=True, flag="ready"),
    "ModelReady": _Simple("ModelName", "Ready", "{}/ready", flag="ready"),
    "ServerMetadata": _Simple("Empty", "Server", "/v2"),
    "ModelMetadata": _Simple("ModelName", "Model", "{}"),
    "ModelConfig": _Simple("ModelName", "ConfigAnswer", "{}/config"),
    "ModelStatistics": _Simple("ModelName", "Statistics", "{}/stats"),
    "RepositoryIndex": _Simple("Repository", "Index", "/v2/repository/index", posts=True),
    "RepositoryModelLoad": _Simple("LoadedModel", "Empty", "/v2/repository/models/{}/load", posts=True),
    "RepositoryModelUnload": _Simple("LoadedModel", "Empty", "/v2/repository/models/{}/unload", posts=True),
    **{
        f"{kind}SharedMemory{verb}": _Simple(
            request, answer, f"/v2/{kind.lower()}sharedmemory{{}}/{verb.lower()}", posts=verb != "Status"
        )
        for kind, request in (("System", "Region"), ("Cuda", "CudaRegion"))
        for verb, answer in (("Status", "Regions"), ("Register", "Empty"), ("Unregister", "Empty"))
    },
}
_WRAPPED = {"ModelConfig": "config", "RepositoryIndex": "models"}  # the field that holds the route's JSON


def handlers(calls: Calls, most_at_once: int) -> list[grpc.GenericRpcHandler]:
    """The handlers of the services. `most_at_once`: requests of one stream that run at a time."""
    tensors = None
    if calls.tensors is not None:
        from penstock.frontend.kserve.grpc.one_shot import TensorCalls  # imports NumPy

        tensors = TensorCalls(calls)
    infer = _Infer(calls, most_at_once, tensors)
    health = _Health(calls)
    methods = {
        name: _one(calls, _simple(calls, name, method), method.request, is_open=method.is_open)
        for name, method in _SIMPLE.items()
    }
    methods["ModelInfer"] = _one(calls, infer.whole, "InferRequest")
    if tensors is not None:
        methods["ModelInfer"] = _infer_at_once(calls, infer, tensors)
    methods["ModelStreamInfer"] = _handler(infer.stream)
    of_health = {"Check": _one(calls, health.check, "HealthRequest", is_open=True), "Watch": _handler(health.watch)}
    return [
        grpc.method_handlers_generic_handler(INFERENCE, methods),
        grpc.method_handlers_generic_handler(HEALTH, of_health),
    ]


def _handler(run: Callable[[Any, Any], Awaitable[None]]) -> Any:
    """A method that receives and sends its messages itself. Those received are bytes."""
    return grpc.stream_stream_rpc_method_handler(run, None, encode)


def _one(calls: Calls, handle: Handle, request: str, *, is_open: bool = False) -> Any:
    """A method with one message and one answer."""

    async def run(_: Any, context: Any) -> None:
        if not is_open:
            await calls.check_key(context)
        with calls.answering() as unread:
            try:
                answer = await handle(_read(request, await calls.receive(context)), context, unread)
            except APIError as error:
                await fail(context, error)
            else:
                await calls.write(context, answer)

    return _handler(run)


def _infer_at_once(calls: Calls, infer: "_Infer", tensors: "TensorCalls") -> Any:
    """ModelInfer of a server with a repository. The answer, its metadata and its status are one operation of gRPC,
    which takes half the time of three."""

    async def run(_: Any, context: Any) -> Any:
        await calls.check_key(context)
        try:
            request = _read("InferRequest", await calls.receive(context))
            if (model := tensors.find(request)) is not None:
                return await tensors.answer(model, request)
            with calls.answering() as unread:
                return encode(await infer.whole(request, context, unread))
        except APIError as error:
            await fail(context, error)

    return grpc.stream_unary_rpc_method_handler(run)


def _read(name: str, data: bytes) -> Any:
    """Decodes a message. Raises APIError 400."""
    if name == "InferRequest":
        check_parts(data)
    try:
        return MESSAGES[name].FromString(data)
    except DecodeError as error:
        raise invalid(f"the message cannot be decoded: {error}") from error


class _Infer:
    def __init__(self, calls: Calls, most_at_once: int, tensors: "TensorCalls | None") -> None:
        self._calls = calls
        self._most_at_once = most_at_once
        self._tensors = tensors

    async def whole(self, request: Any, context: Any, unread: HeldBytes) -> Any:
        """ModelInfer: one answer with the whole text."""
        body = InferInputs(request).body()
        return infer_answer(await self._calls.answer(context, unread, _model(request) + "/infer", body))

    async def stream(self, _: Any, context: Any) -> None:
        """ModelStreamInfer: requests run at the same time; each has any number of answers, in order. A request that
        fails does not end the others. When too many run, the next ones wait, and then the client does."""
        await self._calls.check_key(context)
        try:
            with self._calls.stream():
                await self._answers(context)
        except APIError as error:
            await fail(context, error)

    async def _answers(self, context: Any) -> None:
        turns = asyncio.Semaphore(self._most_at_once)
        writing = asyncio.Lock()  # a call has one write at a time
        handler = asyncio.current_task()

        async def write(answer: Any) -> None:
            async with writing:
                with contextlib.suppress(grpc.aio.BaseError):  # the client has gone: this call is cancelled next
                    await self._calls.write(context, answer, handler)

        async def run(data: bytes) -> None:
            try:
                with self._calls.answering() as unread:
                    await self._answer(data, context, write, unread)
            finally:
                turns.release()

        async with asyncio.TaskGroup() as tasks:
            while isinstance(data := await context.read(), bytes):
                await turns.acquire()
                tasks.create_task(run(data))

    async def _answer(
        self, data: bytes, context: Any, write: Callable[[Any], Awaitable[None]], unread: HeldBytes
    ) -> None:
        """Sends the answers to one request of a stream."""
        request = MESSAGES["InferRequest"]()
        try:
            request = _read("InferRequest", data)
            model = None if self._tensors is None else self._tensors.find(request)
            if model is not None and self._tensors is not None:
                async with contextlib.aclosing(self._tensors.stream(model, request)) as answers:
                    async for answer in answers:
                        await write(MESSAGES["StreamAnswer"](infer_response=answer))
                return
            path = _model(request)
            inputs = InferInputs(request)
            body = inputs.body()
        except APIError as error:
            await write(_stream_error(request, error.message))
            return
        if inputs.streams:
            reply = _StreamedReply(request, write, ends=not inputs.empty_final)
            await self._calls.send(context, unread, path + "/infer_stream", body, reply.send)
            failed = await reply.end()
            if inputs.empty_final and not failed:
                await write(MESSAGES["StreamAnswer"](infer_response=empty_answer(request)))
            return
        answer = await self._calls.ask(context, unread, path + "/infer", body)
        if answer.status >= 400:
            await write(_stream_error(request, answer.message))
        else:
            await write(MESSAGES["StreamAnswer"](infer_response=infer_answer(answer.body, final=True)))


class _StreamedReply:
    """Sends the events of an HTTP answer as messages. With `ends`, the last event is the last message."""

    def __init__(self, request: Any, write: Callable[[Any], Awaitable[None]], *, ends: bool) -> None:
        self._ends = ends
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
                    await self._write(MESSAGES["StreamAnswer"](infer_response=stream_answer(data, ends=self._ends)))

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
        self._watches = 0

    async def check(self, request: Any, context: Any, unread: HeldBytes) -> Any:
        if request.service not in ("", INFERENCE, HEALTH):
            message = f"there is no service {request.service[:100]!r}; the services are {INFERENCE} and {HEALTH}"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
        return await self._answer(context, unread)

    async def watch(self, _: Any, context: Any) -> None:
        """Sends the status now, and whenever it changes."""
        if self._watches >= _MAX_WATCHES:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{_MAX_WATCHES} clients watch this server's health, the limit; call Check instead",
            )
        self._watches += 1
        try:
            request = _read("HealthRequest", await self._calls.receive(context))
            if request.service not in ("", INFERENCE, HEALTH):
                await self._calls.write(context, MESSAGES["HealthAnswer"](status=SERVICE_UNKNOWN))
                return
            last = None
            while True:
                with self._calls.answering() as unread:
                    answer = await self._answer(context, unread)
                if answer != last:
                    last = answer
                    await self._calls.write(context, answer)
                await asyncio.sleep(_LOOK_SECONDS)
        except APIError as error:
            await fail(context, error)
        finally:
            self._watches -= 1

    async def _answer(self, context: Any, unread: HeldBytes) -> Any:
        ready = (await self._calls.ask(context, unread, "/v2/health/ready")).status == 200
        return MESSAGES["HealthAnswer"](status=SERVING if ready else NOT_SERVING)


def _simple(calls: Calls, name: str, method: _Simple) -> Handle:
    async def handle(request: Any, context: Any, unread: HeldBytes) -> Any:
        path, body = method.path, b"{}"
        if method.request == "LoadedModel":
            if not request.model_name.strip():
                raise invalid("Model name cannot be empty. Please enter a valid name to deploy.", "model_name")
            path = path.format(_bounded(request.model_name))
            body = orjson.dumps({"parameters": dict(map(_parameter, request.parameters))})
        elif method.request == "Repository":
            body = orjson.dumps({"ready": request.ready})
        elif method.request in ("Region", "CudaRegion"):
            path = path.format(f"/region/{_bounded(request.name)}" if request.name else "")
            if name == "SystemSharedMemoryRegister":
                region = {"key": request.key, "offset": request.offset, "byte_size": request.byte_size}
                body = orjson.dumps(region)
        elif name == "ModelStatistics" and not request.name:
            path = "/v2/models/stats"
        elif "{}" in path:
            path = path.format(_versioned(request.name, request.version))
        answer = await calls.ask(context, unread, path, body if method.posts else None)
        if method.flag and answer.status in (200, 404, 503):
            return MESSAGES[method.answer](**{method.flag: answer.status == 200})
        if answer.status >= 400:
            await fail(context, answer)
        fields = orjson.loads(answer.body) if answer.body and method.answer != "Empty" else {}
        if method.answer == "Regions":
            fields = {"regions": [{"key": each["name"], "value": each} for each in fields]}
        elif name in _WRAPPED:
            fields = {_WRAPPED[name]: _with_pairs(fields)}
        return json_format.ParseDict(fields, MESSAGES[method.answer](), ignore_unknown_fields=name == "ModelConfig")

    return handle


def _parameter(pair: Any) -> tuple[str, Any]:
    """A parameter of a request to load a model, as the HTTP route has it: files are base64 there."""
    kind = pair.value.WhichOneof("choice")
    if kind == "bytes_param":
        return pair.key, base64.b64encode(pair.value.bytes_param).decode()
    return pair.key, None if kind is None else getattr(pair.value, kind)


def _with_pairs(fields: Any) -> Any:
    """The fields of a configuration whose maps are lists of pairs, as these messages have them."""
    if isinstance(fields, list):
        return [_with_pairs(each) for each in fields]
    if not isinstance(fields, dict):
        return fields
    return {
        name: [{"key": key, "value": each} for key, each in value.items()] if name in _MAPS else _with_pairs(value)
        for name, value in fields.items()
    }


def _model(request: Any) -> str:
    return _versioned(request.model_name, request.model_version)


def _versioned(model: str, version: str) -> str:
    return f"/v2/models/{_bounded(model)}" + (f"/versions/{_bounded(version)}" if version else "")


def _bounded(name: str) -> str:
    """A part of a path. Raises APIError 400 if it is too long."""
    if len(name) > _MAX_NAME_CHARS:
        raise invalid(f"a name has {len(name)} characters; the limit is {_MAX_NAME_CHARS}: shorten it", "model_name")
    return name


def _stream_error(request: Any, message: str) -> Any:
    """The message for a request that failed. It has the request's id, for clients that read it."""
    answer = MESSAGES["InferAnswer"](id=request.id[:_MAX_ID_CHARS])
    return MESSAGES["StreamAnswer"](error_message=message, infer_response=answer)
