"""The parameters of Triton's generate and infer. Their names are those of vLLM, whose backend Triton has."""

from typing import Annotated, Any

import msgspec

from penstock.frontend.describe import NOT_EMPTY
from penstock.messages import GivenSampling

_OUTPUT = msgspec.Meta(extra_json_schema={"properties": {"name": {"const": "text_output"}}, "required": ["name"]})


class Parameters(GivenSampling, kw_only=True, forbid_unknown_fields=True):
    """How to sample, and what the answer has."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    exclude_input_in_output: bool | None = None
    # accepted without effect: the path says whether the answer is a stream, and answers have one tensor
    stream: bool | None = None
    binary_data_output: Any = None


class GenerateFields(Parameters, kw_only=True, forbid_unknown_fields=True):
    """The body of generate. Parameters are in `parameters`, or beside `text_input`."""

    text_input: Annotated[str, NOT_EMPTY]
    parameters: Parameters | None = None
    id: str | None = None


class TextTensor(msgspec.Struct):
    """An input of infer."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of infer."""

    inputs: Annotated[list[TextTensor], NOT_EMPTY]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[Annotated[dict[str, Any], _OUTPUT]] | None = None
