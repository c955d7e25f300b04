"""Turns messages of ModelInfer into the JSON of the HTTP route, and its answers into messages."""

import struct
from typing import Any

import orjson

from penstock.frontend.errors import invalid
from penstock.frontend.kserve.codec import FINAL
from penstock.frontend.kserve.grpc.messages import MESSAGES

EMPTY_FINAL = "triton_enable_empty_final_response"  # a parameter of a request that is no sampling parameter

_MAX_PARTS = 64  # inputs, parameters or outputs of a request
_MAX_ELEMENTS = 2  # that are read of a tensor: the route takes one, and refuses two
_LENGTH = struct.Struct("<I")  # before each element of a BYTES tensor


class InferInputs:
    """The content of a ModelInferRequest, as the HTTP route reads it."""

    def __init__(self, request: Any) -> None:
        """Raises APIError 400 that names the tensor."""
        for name in ("inputs", "parameters", "outputs"):
            if len(getattr(request, name)) > _MAX_PARTS:
                raise invalid(f"{name} has more than {_MAX_PARTS} entries, the limit; send fewer", name)
        raw = request.raw_input_contents
        if raw and len(raw) != len(request.inputs):
            raise invalid(
                f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs; send one for each",
                "inputs",
            )
        self._tensors = [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "data": _raw_data(tensor, raw[i]) if raw else _data(tensor),
            }
            for i, tensor in enumerate(request.inputs)
        ]
        self._parameters = {pair.key: _value(pair.value) for pair in request.parameters}
        self.empty_final = self._parameters.pop(EMPTY_FINAL, False) is True  # the client needs a last, empty answer
        self.streams = any(tensor["name"] == "stream" and tensor["data"] == [True] for tensor in self._tensors)
        self._request = request

    def body(self) -> bytes:
        fields: dict[str, Any] = {"inputs": self._tensors, "parameters": self._parameters}
        if self._request.id:
            fields["id"] = self._request.id
        if self._request.outputs:
            fields["outputs"] = [{"name": output.name} for output in self._request.outputs]
        return orjson.dumps(fields)


def infer_answer(body: bytes, *, final: bool | None = None) -> Any:
    """The message for an answer of the HTTP route. `final` says whether it is the last one of its request, for clients
    of streams; None: it is not said."""
    return _infer_answer(orjson.loads(body), final)


def stream_answer(event: bytes, *, ends: bool) -> Any:
    """The message for an event of the HTTP route's stream. With `ends`, the last event is the last answer."""
    fields = orjson.loads(event)
    return _infer_answer(fields, ends and "parameters" in fields)


def _infer_answer(fields: dict[str, Any], final: bool | None) -> Any:
    answer = _answer(fields["model_name"], fields["model_version"], fields.get("id", ""), final)
    for output in fields["outputs"]:
        answer.outputs.add(name=output["name"], datatype=output["datatype"], shape=output["shape"])
        elements = (element.encode() for element in output["data"])
        answer.raw_output_contents.append(b"".join(_LENGTH.pack(len(element)) + element for element in elements))
    return answer


def empty_answer(request: Any) -> Any:
    """The message that ends the answers to a request and holds no tensor."""
    return _answer(request.model_name, request.model_version or "1", request.id, True)


def _answer(model: str, version: str, answer_id: str, final: bool | None) -> Any:
    answer = MESSAGES["InferAnswer"](model_name=model, model_version=version, id=answer_id)
    if final is not None:
        pair = answer.parameters.add(key=FINAL)
        pair.value.bool_param = final
    return answer


def _value(value: Any) -> Any:
    kind = value.WhichOneof("choice")
    return None if kind is None else getattr(value, kind)


def _raw_data(tensor: Any, raw: bytes) -> list[Any]:
    """The elements of a tensor that has its own bytes. Raises APIError 400."""
    if tensor.datatype == "BOOL":
        return [bool(byte) for byte in raw[:_MAX_ELEMENTS]]
    if tensor.datatype != "BYTES":
        return []  # the route refuses the type
    elements: list[str] = []
    at = 0
    while at < len(raw) and len(elements) < _MAX_ELEMENTS:
        end = at + _LENGTH.size
        size = _LENGTH.unpack_from(raw, at)[0] if end <= len(raw) else len(raw)
        if end + size > len(raw):
            raise invalid(f"input {tensor.name[:100]!r} ends in the middle of an element", "inputs")
        elements.append(_text(tensor, raw[end : end + size]))
        at = end + size
    return elements


def _data(tensor: Any) -> list[Any]:
    """The elements of a tensor that has typed contents. Raises APIError 400."""
    if tensor.datatype == "BOOL":
        return list(tensor.contents.bool_contents[:_MAX_ELEMENTS])
    return [_text(tensor, element) for element in tensor.contents.bytes_contents[:_MAX_ELEMENTS]]


def _text(tensor: Any, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise invalid(f"input {tensor.name[:100]!r} is not UTF-8; send text in UTF-8", "inputs") from None
