"""The ranges of sampling parameters.

They are checked twice: by the API process, with the server's limit of logprobs, and by the engine before a request is
scheduled. The sampler relies on the second.
"""

from penstock.messages.protocols import RequestRejected
from penstock.messages.request import SamplingParams

MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKENS = 256
MAX_BIAS = 100.0
MAX_ADDITIVE_PENALTY = 2.0
REPETITION_RANGE = (0.01, 100.0)  # beyond it a float32 logit can overflow


class InvalidParameter(RequestRejected):
    """A sampling parameter out of its range. `param` is its name in the OpenAI API (or in vLLM's additions to it)."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def check_sampling(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Refuse parameters that no model of `vocab_size` logits can honour, or that cost more than the server allows.

    Raises InvalidParameter, whose message names the parameter, its value, the limit and the remedy.
    """
    _check_integers(params, max_logprobs)
    _check_reals(params)
    _check_token_ids(params, vocab_size)


def _check_integers(params: SamplingParams, max_logprobs: int) -> None:
    _require_between("seed", params.seed, 0, 2**64 - 1)
    if params.max_tokens < 0:
        raise _invalid("max_tokens", params.max_tokens, "0 or more")
    if not 0 <= params.min_tokens <= params.max_tokens:
        limit = f"from 0 to max_tokens ({params.max_tokens})"
        raise _invalid("min_tokens", params.min_tokens, limit, "lower it or raise max_tokens")
    if params.top_k < 0:
        raise _invalid("top_k", params.top_k, "0 (off) or more")
    for param, k in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if k is not None and not 0 <= k <= max_logprobs:
            raise _invalid(param, k, f"from 0 to {max_logprobs}", "ask for fewer or raise the server's --max-logprobs")


def _check_reals(params: SamplingParams) -> None:
    # Written so that a NaN, which compares false with everything, is refused too.
    if not 0.0 <= params.temperature < float("inf"):
        raise _invalid("temperature", params.temperature, "0 (greedy) or more, and finite")
    _require_between("top_p", params.top_p, 0.0, 1.0)
    _require_between("min_p", params.min_p, 0.0, 1.0)
    _require_between("presence_penalty", params.presence_penalty, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)
    _require_between("frequency_penalty", params.frequency_penalty, -MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY)
    _require_between("repetition_penalty", params.repetition_penalty, *REPETITION_RANGE)
    for token, bias in params.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _invalid("logit_bias", f"{bias} for token {token}", f"from {-MAX_BIAS:g} to {MAX_BIAS:g}")


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    for param, ids, most in (
        ("logit_bias", params.logit_bias, MAX_LOGIT_BIAS),
        ("stop_token_ids", params.stop_token_ids, MAX_STOP_TOKENS),
    ):
        if len(ids) > most:
            raise InvalidParameter(f"{param} has {len(ids)} entries; the limit is {most}: send fewer", param)
        for token in ids:
            if not 0 <= token < vocab_size:
                raise _invalid(param, f"token id {token}", f"from 0 to {vocab_size - 1}, the model's vocabulary")


def _require_between(param: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        limit = f"from {low:g} to {high:g}" if isinstance(low, float) else f"from {low} to {high}"
        raise _invalid(param, value, limit)


def _invalid(param: str, value: object, limit: str, remedy: str = "send a value in that range") -> InvalidParameter:
    return InvalidParameter(f"{param} is {value}; it must be {limit}: {remedy}", param)
