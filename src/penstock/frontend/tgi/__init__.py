"""The wire of Hugging Face's text-generation-inference (TGI)."""

from collections.abc import Mapping

from penstock.frontend.describe import Operation
from penstock.frontend.tgi import answers
from penstock.frontend.tgi.errors import encode_error
from penstock.frontend.tgi.fields import GenerateFields
from penstock.frontend.tgi.generate import read_any, read_generate, read_stream
from penstock.frontend.tgi.info import show_info

_EXAMPLE = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}
_STREAM = "text/event-stream"
OPERATIONS: Mapping[str, Operation] = {
    "read_any": Operation(
        summary="Continue a text", shape=[answers.GENERATED], request=GenerateFields, example=_EXAMPLE, stream=_STREAM
    ),
    "read_generate": Operation(
        summary="Continue a text", shape=answers.GENERATED, request=GenerateFields, example=_EXAMPLE
    ),
    "read_stream": Operation(
        summary="Continue a text in a stream", request=GenerateFields, example=_EXAMPLE, answer=_STREAM
    ),
    "show_info": Operation(summary="Show the model and the limits", shape=answers.INFO),
}
