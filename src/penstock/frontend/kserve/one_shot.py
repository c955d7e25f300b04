"""POST /v2/models/{model}/infer of one-shot models: tensors as JSON, or with the binary data extension."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.describe import NOT_EMPTY
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Answer, StreamedAnswer, first_value
from penstock.frontend.http.body import decode
from penstock.frontend.http.sse import HEARTBEAT, STREAM_TYPE, sse_event
from penstock.frontend.http.streamed import HEARTBEAT_SECONDS
from penstock.frontend.kserve.codec import FINAL
from penstock.frontend.kserve.errors import error_body
from penstock.frontend.kserve.shared_memory import check_size, shared_part
from penstock.frontend.kserve.tensor_data import as_bytes, classify, pack, raw_shape, repository_error, unpack
from penstock.messages.arrays import pack_strings
from penstock.messages.tensors import InferRequest, InferResult, Tensor, TensorModel

HEADER_LENGTH = b"inference-header-content-length"  # bytes of JSON before the binary data
_BINARY = b"application/octet-stream"
_MAX_TENSORS = 1024  # inputs, outputs or parameters of a request
_MICROSECONDS = 1e6
_OF_QUEUE = frozenset(("sequence_id", "priority", "timeout"))  # parameters
_OF_STREAMS = MappingProxyType(
    {"cache-control": "no-cache", "x-accel-buffering": "no"}
)  # headers: nothing keeps events


class InputField(msgspec.Struct):
    """An input. Its elements are in `data`, or follow the JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: Any = None
    parameters: dict[str, Any] = {}


class OutputField(msgspec.Struct):
    """An output that the client requests."""

    name: str
    parameters: dict[str, Any] = {}


class InferBody(msgspec.Struct):
    """The body of infer for a one-shot model."""

    inputs: Annotated[list[InputField], NOT_EMPTY]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[OutputField] | None = None


async def infer(body: bytes, context: RequestContext, model: TensorModel) -> Answer:
    """Answers a request. Raises APIError that names the tensor."""
    length = first_value(context.headers, HEADER_LENGTH)
    if length == b"0":
        fields, request = InferBody(inputs=[], parameters={"binary_data_output": True}), _raw(body, model)
    else:
        split = len(body) if length is None else _length(length, len(body))
        fields = decode(InferBody, body[:split])
        request = _request(fields, memoryview(body)[split:], context, binary=length is not None)
    try:
        result = await model.infer(request)
    except Exception as error:
        raise repository_error(error, context.limits.retry_after) from error
    return _answer(fields, result, model, context)


async def infer_stream(body: bytes, context: RequestContext, model: TensorModel) -> StreamedAnswer:
    """Answers a request with an event for each piece of the outputs, and a last one for all others.

    Raises APIError that names the tensor.
    """
    fields = decode(InferBody, body)
    results = model.stream(_request(fields, memoryview(b""), context, binary=False))
    for output in fields.outputs or ():
        if shared_part(context.models.memory, output.parameters) is not None:
            raise invalid(f"output {output.name[:100]!r} of a stream cannot go to shared memory", "outputs")
    try:
        first = await anext(results)
    except Exception as error:
        raise repository_error(error, context.limits.retry_after) from error
    return StreamedAnswer(_events(first, results, fields, model, context), STREAM_TYPE, headers=_OF_STREAMS)


async def _events(
    result: InferResult,
    results: AsyncGenerator[InferResult, None],
    fields: InferBody,
    model: TensorModel,
    context: RequestContext,
) -> AsyncGenerator[bytes, None]:
    coming: asyncio.Future[InferResult] | None = None
    try:
        while True:
            context.reserve(sum(len(tensor.data) for tensor in result.outputs))
            head = _head(fields, model) | ({"parameters": {FINAL: True}} if result.final else {})
            outputs = [_described(tensor) | {"data": unpack(tensor)} for tensor in result.outputs]
            yield sse_event(orjson.dumps({**head, "outputs": outputs}))
            if result.final:
                return
            coming = asyncio.ensure_future(anext(results))
            while not (await asyncio.wait([coming], timeout=HEARTBEAT_SECONDS))[0]:
                yield HEARTBEAT
            result = coming.result()
    except Exception as error:
        yield sse_event(error_body(repository_error(error, context.limits.retry_after)))
    finally:
        if coming is not None and coming.cancel():
            await asyncio.wait([coming])
        await results.aclose()


def has_rows(model: TensorModel) -> bool:
    return bool(model.config().get("max_batch_size"))


def check_counts(**counts: int) -> None:
    """Raises APIError 400 if a request has too many of something."""
    for name, many in counts.items():
        if many > _MAX_TENSORS:
            raise invalid(f"{name} has {many} entries; the limit is {_MAX_TENSORS}: send fewer", name)


def queue_parameters(parameters: Mapping[str, Any]) -> tuple[int, float | None]:
    """Returns the priority, and the timeout in seconds. Raises APIError 400."""
    if _OF_QUEUE.isdisjoint(parameters):
        return 0, None
    if parameters.get("sequence_id"):
        raise invalid(
            "parameter sequence_id is not supported: requests of a sequence have no state here",
            "parameters.sequence_id",
            "unsupported_parameter",
        )
    found = []
    for name in ("priority", "timeout"):
        value = parameters.get(name) or 0
        if not isinstance(value, int) or not 0 <= value < 2**63:
            raise invalid(f"parameter {name} must be a whole number of at least 0", f"parameters.{name}")
        found.append(value)
    return found[0], found[1] / _MICROSECONDS or None


def _request(fields: InferBody, rest: memoryview, context: RequestContext, *, binary: bool) -> InferRequest:
    outputs, memory = fields.outputs or [], context.models.memory
    check_counts(inputs=len(fields.inputs), outputs=len(outputs))
    for output in outputs:
        shared_part(memory, output.parameters)  # raises before the model runs
    priority, timeout = queue_parameters(fields.parameters)
    parts = [shared_part(memory, field.parameters) for field in fields.inputs]
    check_size(parts, context.limits.max_body_bytes)
    tensors, at = [], 0
    for field, part in zip(fields.inputs, parts, strict=True):
        size = field.parameters.get("binary_data_size")
        if part is not None:
            data: Any = part.read()
        elif size is None:
            if field.data is None:
                raise invalid(f"input {field.name[:100]!r} has no data; send data, or binary_data_size", "inputs")
            data = pack(field.name, field.datatype, field.shape, field.data)
        else:
            if not binary or not isinstance(size, int) or not 0 <= size <= len(rest) - at:
                raise invalid(
                    f"input {field.name[:100]!r} has binary_data_size {size!r:.40}, but {len(rest) - at} bytes follow; "
                    "check it, and the header Inference-Header-Content-Length",
                    "inputs",
                )
            data = rest[at : at + size]
            at += size
        tensors.append(Tensor(field.name, field.datatype, tuple(field.shape), data))
    if at != len(rest):
        raise invalid(f"{len(rest) - at} bytes follow the inputs; each input needs its binary_data_size", "inputs")
    names = tuple(output.name for output in outputs)
    return InferRequest(inputs=tensors, outputs=names, priority=priority, timeout=timeout, id=fields.id)


def _raw(body: bytes, model: TensorModel) -> InferRequest:
    """The request whose body is one input, without JSON. Raises APIError 400."""
    if len(model.inputs) != 1:
        raise invalid(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(model.inputs)} inputs in "
            f"{model.name!r} model configuration",
            "inputs",
        )
    (spec,) = model.inputs
    shape = raw_shape(len(body), spec.datatype, spec.shape, spec.name, rows=has_rows(model))
    data = pack_strings([body]) if spec.datatype == "BYTES" else body
    return InferRequest(inputs=[Tensor(spec.name, spec.datatype, shape, data)])


def _answer(fields: InferBody, result: InferResult, model: TensorModel, context: RequestContext) -> Answer:
    asked = {output.name: output.parameters for output in fields.outputs or ()}
    all_binary = bool(fields.parameters.get("binary_data_output"))
    outputs, parts = [], []
    context.reserve(sum(len(tensor.data) for tensor in result.outputs))
    for tensor in result.outputs:
        parameters = asked.get(tensor.name, {})
        if classes := parameters.get("classification"):
            tensor = classified(tensor, classes, model)
        shown = _described(tensor)
        if (part := shared_part(context.models.memory, parameters)) is not None:
            part.write(tensor.name, tensor.data)  # Triton's C++ client takes no parameters of a region in an answer
        elif parameters.get("binary_data", all_binary):
            shown["parameters"] = {"binary_data_size": len(tensor.data)}
            parts.append(as_bytes(tensor.data))
        else:
            shown["data"] = unpack(tensor)
        outputs.append(shown)
    text = orjson.dumps({**_head(fields, model), "outputs": outputs})
    if not parts:
        return Answer(text)
    headers = {"inference-header-content-length": str(len(text))}
    return Answer(b"".join((text, *parts)), content_type=_BINARY, headers=headers)


def _head(fields: InferBody, model: TensorModel) -> dict[str, Any]:
    head: dict[str, Any] = {"model_name": model.name, "model_version": model.version}
    return {**head, "id": fields.id} if fields.id else head


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}


def classified(tensor: Tensor, classes: Any, model: TensorModel) -> Tensor:
    """The best classes of an output. Raises APIError 400."""
    if not isinstance(classes, int):
        raise invalid("parameter classification must be a whole number", "outputs")
    return classify(tensor, classes, model.labels.get(tensor.name, ()), rows=has_rows(model))


def _length(value: bytes, most: int) -> int:
    """The length of the JSON. Raises APIError 400."""
    if not value.isdigit() or len(value) > 12 or int(value) > most:
        shown = value[:40].decode("latin-1")
        raise APIError(
            400,
            f"the header Inference-Header-Content-Length is {shown!r}; the body has {most} bytes",
            code="invalid_value",
        )
    return int(value)
