"""The parameters that the library takes. Their names are vLLM's, so that its users' scripts run."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.messages import GivenSampling


class _NamesKnown(msgspec.StructMeta):
    """Structs whose constructor says which parameter was meant."""

    def __call__(cls, *args: Any, **values: Any) -> Any:
        """Raises TypeError that names a parameter that does not exist."""
        known: Sequence[str] = cls.__struct_fields__
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(known))}"
                raise TypeError(f"{cls.__name__} has no parameter {name!r}; {remedy}")
        return super().__call__(*args, **values)


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_NamesKnown):
    """A constraint that the whole output must match: exactly one of these fields is set."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # in llguidance's dialect of Lark
    json_object: bool | None = None


class SamplingParams(GivenSampling, kw_only=True, metaclass=_NamesKnown):
    """How the output of a prompt is generated. None leaves a value to the model's recommendation, or to the default.

    The sampling parameters are those of `penstock.declared.sampling`: `temperature`, `top_p`, `top_k` and the others.

    `max_tokens` is 16 by default for a prompt, and what the context allows for a chat. `temperature` 0 is greedy.
    `logprobs` and `prompt_logprobs` are the numbers of alternatives for each token.
    """

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    priority: int | None = None

    def request_fields(self, *, chat: bool) -> dict[str, Any]:
        """Returns the equivalent fields of a request to OpenAI's API."""
        given = _given(self)
        if chat and self.logprobs is not None:
            given["logprobs"], given["top_logprobs"] = True, self.logprobs
        if self.logit_bias is not None:
            given["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            given["structured_outputs"] = _given(self.structured_outputs)
        return given


def _given(params: SamplingParams | StructuredOutputsParams) -> dict[str, Any]:
    return {name: value for name in params.__struct_fields__ if (value := getattr(params, name)) is not None}
