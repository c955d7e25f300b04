"""POST /v2/models/{model}/infer and infer_stream, with tensors as JSON."""

from typing import Any

from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Answer, StreamedAnswer
from penstock.frontend.http.body import decode
from penstock.frontend.kserve.codec import InferCodec
from penstock.frontend.kserve.fields import InferFields, Parameters, TextTensor
from penstock.frontend.kserve.generate import one_shot_model, read_text

TEXTS = ("text_input", "sampling_parameters")  # inputs of the type BYTES
FLAGS = ("stream", "exclude_input_in_output")  # of BOOL; over HTTP, the path says whether the answer is a stream


async def read_infer(body: bytes, context: RequestContext) -> Call | Answer:
    """Reads a request for a whole answer. A one-shot model answers at once. Raises APIError 400 or 404 that names the
    tensor or the parameter."""
    if context.models.tensors is not None:
        if (model := one_shot_model(context)) is not None:
            from penstock.frontend.kserve.one_shot import infer  # imports NumPy

            return await infer(body, context, model)
        context.models.find(context.path["model"])  # a name that nothing has is the first error
    return await _read(body, context, streams=False)


async def read_infer_stream(body: bytes, context: RequestContext) -> Call | StreamedAnswer:
    """Reads a request for a stream, each of whose events is an answer of infer. Raises APIError as `read_infer`."""
    if context.models.tensors is not None and (model := one_shot_model(context)) is not None:
        from penstock.frontend.kserve.one_shot import infer_stream  # imports NumPy

        return await infer_stream(body, context, model)
    return await _read(body, context, streams=True)


async def _read(body: bytes, context: RequestContext, *, streams: bool) -> Call:
    if any(name == b"inference-header-content-length" for name, _ in context.headers):
        raise APIError(415, "this model takes no binary tensors; send them as JSON (binary_data=False)")
    fields = decode(InferFields, body)
    inputs = {tensor.name: tensor for tensor in fields.inputs}
    if unknown := inputs.keys() - {*TEXTS, *FLAGS}:
        name = min(unknown)[:100]
        raise invalid(f"input {name!r} is unknown; the inputs are {', '.join((*TEXTS, *FLAGS))}", "inputs")
    if "text_input" not in inputs:
        raise invalid("input text_input is missing", "inputs", "missing_parameter")
    for output in fields.outputs or ():
        if output.get("name") != "text_output":
            raise invalid(f"output {str(output.get('name'))[:100]!r} is unknown; the output is text_output", "outputs")
    texts = {name: _text(inputs[name]) for name in TEXTS if name in inputs}
    flags = {name: _flag(inputs[name]) for name in FLAGS if name in inputs}
    parameters = fields.parameters or Parameters()
    if "sampling_parameters" in texts:  # a JSON object, as in Triton's backend for vLLM
        parameters = decode(Parameters, _bounded(texts["sampling_parameters"], context).encode())
    if "exclude_input_in_output" in flags:
        parameters.exclude_input_in_output = flags["exclude_input_in_output"]
    return await read_text(texts["text_input"], parameters, context, InferCodec, fields.id, streams)


def _bounded(text: str, context: RequestContext) -> str:
    """Raises APIError 400 for a text that takes long to decode: its parts have not been counted yet."""
    if len(text) > context.limits.max_parameter_chars:
        raise invalid(
            f"input sampling_parameters has {len(text)} characters; the limit is "
            f"{context.limits.max_parameter_chars}: send less",
            "inputs",
        )
    return text


def _text(tensor: TextTensor) -> str:
    return str(_element(tensor, "BYTES", str, "one text in data"))


def _flag(tensor: TextTensor) -> bool:
    return bool(_element(tensor, "BOOL", bool, "one value in data: true or false"))


def _element(tensor: TextTensor, datatype: str, kind: type, what: str) -> Any:
    """The one element of a tensor. Raises APIError 400 for another datatype, number of elements or shape."""
    data, name = tensor.data or [], tensor.name[:100]
    if tensor.datatype != datatype or len(data) != 1 or not isinstance(data[0], kind):
        raise invalid(f"input {name!r} must have the datatype {datatype} and {what}", "inputs")
    if any(size != 1 for size in tensor.shape):
        shown = ", ".join(map(str, tensor.shape[:8])) + (", ..." if len(tensor.shape) > 8 else "")
        raise invalid(f"input {name!r} has the shape [{shown}], but one element; send the shape [1]", "inputs")
    return data[0]
