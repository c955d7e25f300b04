"""The sampling parameters of a request: as it gives them, and as the engine takes them. Their ranges, and how to add
one, are in `penstock.declared.sampling`."""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from penstock.declared.sampling import SAMPLING


def range_of(name: str) -> msgspec.Meta:
    """Returns the annotation of a field that describes it in the OpenAPI document. Decoding checks no range."""
    return msgspec.Meta(extra_json_schema=SAMPLING[name].json_schema)


class GivenSampling(msgspec.Struct, kw_only=True):
    """The sampling parameters that a request sets. None: what the model recommends, else the neutral value."""

    temperature: Annotated[float | None, range_of("temperature")] = None
    top_p: Annotated[float | None, range_of("top_p")] = None
    top_k: Annotated[int | None, range_of("top_k")] = None
    min_p: Annotated[float | None, range_of("min_p")] = None
    top_n_sigma: Annotated[float | None, range_of("top_n_sigma")] = None
    repetition_penalty: Annotated[float | None, range_of("repetition_penalty")] = None
    presence_penalty: Annotated[float | None, range_of("presence_penalty")] = None
    frequency_penalty: Annotated[float | None, range_of("frequency_penalty")] = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the engine chooses the tokens of one request: every parameter has a value. `check_sampling` checks ranges.

    Penalties see prompt and output (repetition) or output only (presence, frequency), as in the OpenAI API and
    transformers. The order in which parameters apply is in runtime/sampling/reference.py.
    """

    seed: int  # 0 .. 2**64-1; always fixed before the engine sees it
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    eos_token_ids: tuple[int, ...] = ()  # the model's own; ignored when ignore_eos
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # k best beside the sampled token; None: no logprobs at all
    prompt_logprobs: int | None = None  # k best for every prompt token but the first

    def stops(self) -> frozenset[int]:
        """The token ids that end a choice."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(self.eos_token_ids))


def _neutral() -> Mapping[str, float]:
    defaults = SamplingParams(seed=0, max_tokens=0)
    return {name: getattr(defaults, name) for name in SAMPLING}


NEUTRAL: Mapping[str, float] = _neutral()  # the values of sampling parameters that change nothing
