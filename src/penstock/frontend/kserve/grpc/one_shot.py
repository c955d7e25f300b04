"""ModelInfer for one-shot models, without the detour over HTTP: a message becomes tensors, and tensors a message."""

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.kserve.codec import FINAL
from penstock.frontend.kserve.generate import find_one_shot
from penstock.frontend.kserve.grpc.calls import Calls
from penstock.frontend.kserve.grpc.messages import MESSAGES, encode
from penstock.frontend.kserve.grpc.tensors import EMPTY_FINAL
from penstock.frontend.kserve.one_shot import check_counts, classified, queue_parameters
from penstock.frontend.kserve.shared_memory import ClientMemory, SharedPart, check_size, shared_part
from penstock.frontend.kserve.tensor_data import as_bytes, pack, repository_error
from penstock.messages.arrays import pack_strings
from penstock.messages.tensors import InferRequest, InferResult, Tensor, TensorModel

ROUTE = "/v2/models/{model}/infer"  # that these calls count as
_CONTENTS: Mapping[str, str] = {
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "BOOL": "bool_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_MAX_HEADS = 1024  # beginnings of answers that are kept
_ID, _RAW = b"\x1a", b"\x32"  # fields 3 and 6 of ModelInferResponse: the id, and a tensor's bytes
_log = logging.getLogger("penstock.access")


class TensorCalls:
    """Answers requests for one-shot models."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._heads: dict[Any, bytes] = {}  # answers without id and data, by model and shapes

    def find(self, request: Any) -> TensorModel | None:
        """Returns the one-shot model that a message names; None if it is none. Raises APIError 404."""
        return find_one_shot(self._calls.tensors, request.model_name, request.model_version)

    async def answer(self, model: TensorModel, request: Any) -> bytes:
        """Runs a ModelInferRequest, and returns a ModelInferResponse. Raises APIError."""
        with self._calls.in_flight():
            try:
                answer = self._encode(model, request, await model.infer(self._read(request)))
            except Exception as raised:
                raise self._failed(model, raised) from raised
            self._calls.count(ROUTE, 200)
            return answer

    async def stream(self, model: TensorModel, request: Any) -> AsyncGenerator[Any, None]:
        """Runs a ModelInferRequest, and yields messages, each with a part of the outputs. Raises APIError."""
        with self._calls.in_flight():
            try:
                empty_final = _values(request.parameters).get(EMPTY_FINAL) is True
                async with aclosing(model.stream(self._read(request))) as results:
                    async for result in results:
                        if result.outputs or empty_final or not model.streams:
                            answer = MESSAGES["InferAnswer"].FromString(self._encode(model, request, result))
                            answer.parameters.add(key=FINAL).value.bool_param = result.final
                            yield answer
            except Exception as raised:
                raise self._failed(model, raised) from raised
            self._calls.count(ROUTE, 200)

    def _read(self, message: Any) -> InferRequest:
        return read_request(message, self._calls.memory, self._calls.limits.max_body_bytes)

    def _failed(self, model: TensorModel, raised: Exception) -> APIError:
        """Counts and logs a request that failed, and returns its error."""
        error = repository_error(raised, self._calls.limits.retry_after)
        self._calls.count(ROUTE, error.status)
        fields = {"path": f"gRPC {model.name}", "status": error.status, "error": error.message}
        _log.info("request", extra={"fields": fields})
        return error

    def _encode(self, model: TensorModel, request: Any, result: InferResult) -> bytes:
        """Joins the parts of a message. Its data is copied once; all else is the same for equal shapes."""
        outputs = result.outputs
        if any(asked.parameters for asked in request.outputs):
            asked = {each.name: _values(each.parameters) for each in request.outputs}
            outputs = [
                classified(each, classes, model)
                if (classes := asked.get(each.name, {}).get("classification")) is not None
                else each
                for each in outputs
            ]
            places = {each.name: shared_part(self._calls.memory, asked.get(each.name, {})) for each in outputs}
            if any(place is not None for place in places.values()):
                return _shared(model, request.id, outputs, places)
        key = (model.name, model.version, tuple((each.name, each.datatype, each.shape) for each in outputs))
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) >= _MAX_HEADS:
                self._heads.clear()
            head = self._heads[key] = _head(model, outputs)
        parts: list[Any] = [head]
        if request.id:
            text = request.id.encode()
            parts += (_ID, _varint(len(text)), text)
        for each in outputs:
            parts += (_RAW, _varint(len(each.data)), each.data)
        return b"".join(parts)


def read_request(message: Any, memory: ClientMemory | None, most: int) -> InferRequest:
    """Returns the request in a ModelInferRequest. Raises APIError 400 that names the tensor. `memory`: the shared
    memory that clients may pass tensors in; the inputs of a request may have `most` bytes there."""
    inputs, raw = message.inputs, message.raw_input_contents
    check_counts(inputs=len(inputs), outputs=len(message.outputs), parameters=len(message.parameters))
    parts = [shared_part(memory, _values(each.parameters)) if each.parameters else None for each in inputs]
    check_size(parts, most)
    if raw and len(raw) != parts.count(None):
        raise invalid(
            f"raw_input_contents has {len(raw)} entries for {parts.count(None)} inputs; send one for each", "inputs"
        )
    tensors, raws = [], iter(raw)
    for each, part in zip(inputs, parts, strict=True):
        data = part.read() if part is not None else next(raws) if raw else _contents(each)
        tensors.append(Tensor(each.name, each.datatype, tuple(each.shape), data))
    for output in message.outputs:
        if output.parameters:
            shared_part(memory, _values(output.parameters))  # raises before the model runs
    priority, timeout = queue_parameters(_values(message.parameters)) if message.parameters else (0, None)
    names = tuple(output.name for output in message.outputs)
    return InferRequest(inputs=tensors, outputs=names, priority=priority, timeout=timeout, id=message.id)


def _contents(tensor: Any) -> bytes:
    """The bytes of an input with typed contents. Raises APIError 400."""
    field = _CONTENTS.get(tensor.datatype)
    if field is None:
        raise invalid(
            f"input {tensor.name[:100]!r} of {tensor.datatype[:40]!r} must be in raw_input_contents", "inputs"
        )
    values = list(getattr(tensor.contents, field))
    return (
        pack_strings(values) if tensor.datatype == "BYTES" else pack(tensor.name, tensor.datatype, tensor.shape, values)
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, kind) for pair in pairs if (kind := pair.value.WhichOneof("choice"))}


def _head(model: TensorModel, outputs: Sequence[Tensor]) -> bytes:
    answer = MESSAGES["InferAnswer"](model_name=model.name, model_version=model.version)
    for each in outputs:
        answer.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
    return encode(answer)


def _shared(
    model: TensorModel, answer_id: str, outputs: Sequence[Tensor], parts: Mapping[str, SharedPart | None]
) -> bytes:
    """The answer whose outputs are, where they have a part, in shared memory."""
    answer = MESSAGES["InferAnswer"](model_name=model.name, model_version=model.version, id=answer_id)
    for each in outputs:
        output = answer.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        part = parts[each.name]
        answer.raw_output_contents.append(as_bytes(each.data) if part is None else b"")
        where = {} if part is None else part.write(each.name, each.data)
        for name, value in where.items():
            kind = "int64_param" if isinstance(value, int) else "string_param"
            setattr(output.parameters.add(key=name).value, kind, value)
    return encode(answer)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)
