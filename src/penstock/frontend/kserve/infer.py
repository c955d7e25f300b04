"""POST /v2/models/{model}/infer, with tensors as JSON."""

import msgspec

from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.body import decode
from penstock.frontend.kserve.codec import InferCodec
from penstock.frontend.kserve.fields import InferFields, Parameters, Tensor
from penstock.frontend.kserve.generate import read_text

_decoder = msgspec.json.Decoder(InferFields)
_parameters = msgspec.json.Decoder(Parameters)


async def read_infer(body: bytes, context: RequestContext) -> Call:
    """Reads a request. Raises APIError 400 or 404 that names the tensor or the parameter."""
    if any(name == b"inference-header-content-length" for name, _ in context.headers):
        raise APIError(415, "binary tensors are not supported; send them as JSON (binary_data=False)")
    fields = decode(_decoder, body)
    texts = {tensor.name: _text(tensor) for tensor in fields.inputs}
    if unknown := texts.keys() - {"text_input", "sampling_parameters"}:
        name = min(unknown)[:100]
        raise invalid(f"input {name!r} is unknown; the inputs are text_input and sampling_parameters", "inputs")
    if "text_input" not in texts:
        raise invalid("input text_input is missing", "inputs", "missing_parameter")
    parameters = fields.parameters or Parameters()
    if "sampling_parameters" in texts:  # a JSON object, as in Triton's backend for vLLM
        parameters = decode(_parameters, _bounded(texts["sampling_parameters"], context).encode())
    return await read_text(texts["text_input"], parameters, context, InferCodec, fields.id, streams=False)


def _bounded(text: str, context: RequestContext) -> str:
    """Raises APIError 400 for a text that takes long to decode: nobody has counted its parts."""
    if len(text) > context.limits.max_parameter_chars:
        raise invalid(
            f"input sampling_parameters has {len(text)} characters; the limit is "
            f"{context.limits.max_parameter_chars}: send less",
            "inputs",
        )
    return text


def _text(tensor: Tensor) -> str:
    """The one text of a tensor."""
    data = tensor.data or []
    if tensor.datatype != "BYTES" or len(data) != 1 or not isinstance(data[0], str):
        name = tensor.name[:100]
        raise invalid(f"input {name!r} must have the datatype BYTES and one text in data", "inputs")
    return data[0]
