"""The values that parameters may have on every wire, for the OpenAPI document and the pages. `sampling.py` and
`messages/limits.py` check them."""

from collections.abc import Mapping
from typing import Any

from penstock.messages.limits import MAX_ADDITIVE_PENALTY, MAX_BIAS, REPETITION_RANGE

RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(("top_p", "min_p"), (0, 1)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (-MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)),
    "repetition_penalty": REPETITION_RANGE,
    "logit_bias": (-MAX_BIAS, MAX_BIAS),
}


def _between(low: float, high: float) -> dict[str, float]:
    return {"minimum": low, "maximum": high}


_POSITIVE = {"minimum": 1}
_NOT_NEGATIVE = {"minimum": 0}
_TEXTS = {"minLength": 1, "items": {"minLength": 1}}
# Keywords of JSON Schema by the parameter's name; a parameter's annotation has precedence. Limits that the operator or
# the model sets are not here.
KEYWORDS: Mapping[str, Mapping[str, Any]] = {
    **{name: _between(*span) for name, span in RANGES.items() if name != "logit_bias"},
    "repeat_penalty": _between(*RANGES["repetition_penalty"]),
    "logit_bias": {
        "additionalProperties": _between(*RANGES["logit_bias"]),
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    },
    "top_k": _between(-1, 2**31 - 1),
    "seed": _between(-(2**63), 2**64 - 1),
    "temperature": _NOT_NEGATIVE,
    "min_tokens": _NOT_NEGATIVE,
    "prompt_logprobs": _NOT_NEGATIVE,
    "top_logprobs": _NOT_NEGATIVE,
    "n": _POSITIVE,
    "best_of": _POSITIVE,
    "max_tokens": _POSITIVE,
    "max_completion_tokens": _POSITIVE,
    "max_output_tokens": _POSITIVE,
    "max_new_tokens": _POSITIVE,
    "dimensions": _POSITIVE,
    "cache_salt": {"minLength": 1, "maxLength": 256},
    "stop": _TEXTS,
    "stop_sequences": _TEXTS,
}
