"""The values that parameters may have on every wire, for the OpenAPI document and the pages. `sampling.py` and
`messages/limits.py` check them. Those of sampling parameters are in `penstock.declared`."""

from collections.abc import Mapping
from typing import Any

from penstock.declared.sampling import SAMPLING
from penstock.messages.limits import MAX_BIAS

RANGES: Mapping[str, tuple[float, float]] = {
    **{name: (each.least, each.most) for name, each in SAMPLING.items() if each.most < float("inf")},
    "logit_bias": (-MAX_BIAS, MAX_BIAS),
}


def _between(low: float, high: float) -> dict[str, float]:
    return {"minimum": low, "maximum": high}


_POSITIVE = {"minimum": 1}
_NOT_NEGATIVE = {"minimum": 0}
_TEXTS = {"minLength": 1, "items": {"minLength": 1}}
# Keywords of JSON Schema by the parameter's name; a parameter's annotation has precedence: sampling parameters have
# theirs. Limits that the operator or the model sets are not here.
KEYWORDS: Mapping[str, Mapping[str, Any]] = {
    "logit_bias": {
        "additionalProperties": _between(*RANGES["logit_bias"]),
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    },
    "seed": _between(-(2**63), 2**64 - 1),
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
