"""The parameters of TGI's API. Unknown parameters are refused by name."""

from typing import Annotated, Any

import msgspec

from penstock.frontend.describe import NOT_EMPTY, unsupported
from penstock.messages import GivenSampling


class GrammarFields(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    value: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)


class Parameters(GivenSampling, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    do_sample: bool | None = None
    seed: int | None = None
    stop: list[str] | None = None
    grammar: GrammarFields | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    top_n_tokens: int | None = None
    return_full_text: bool | None = None
    truncate: int | None = None
    # refused unless they have no effect
    adapter_id: Annotated[Any, unsupported()] = None
    best_of: Annotated[Any, unsupported(1)] = None
    typical_p: Annotated[Any, unsupported(1)] = None
    watermark: Annotated[Any, unsupported(False)] = None


class GenerateFields(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /generate, /generate_stream and /."""

    inputs: Annotated[str, NOT_EMPTY]
    parameters: Parameters | None = None
    stream: bool | None = None
