"""Checks of what a request asks of the sampler. The ranges of sampling parameters are in `penstock.declared`.

They are checked twice: by the API process, with the server's limit of logprobs, and by the engine before a request is
scheduled. The sampler relies on the second.
"""

from math import inf

from penstock.declared.sampling import SAMPLING
from penstock.messages.protocols import RequestRejected
from penstock.messages.sampling import SamplingParams

MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP_TOKENS = 256
MAX_BIAS = 100.0


class InvalidParameter(RequestRejected):
    """A sampling parameter out of its range. `param` is its name in the OpenAI API (or in vLLM's additions to it)."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def check_sampling(params: SamplingParams, vocab_size: int, max_logprobs: int) -> None:
    """Refuse parameters that no model of `vocab_size` logits can honour, or that cost more than the server allows.

    Raises InvalidParameter, whose message names the parameter, its value, the limit and the remedy.
    """
    for name, parameter in SAMPLING.items():
        value = getattr(params, name)
        if not parameter.least <= value <= parameter.most or value == inf:  # not NaN either, which compares false
            raise _invalid(name, value, parameter.limit)
    if not 0 <= params.seed < 2**64:
        raise _invalid("seed", params.seed, f"from 0 to {2**64 - 1}")
    if params.max_tokens < 0:
        raise _invalid("max_tokens", params.max_tokens, "0 or more")
    if not 0 <= params.min_tokens <= params.max_tokens:
        limit = f"from 0 to max_tokens ({params.max_tokens})"
        raise _invalid("min_tokens", params.min_tokens, limit, "lower it or raise max_tokens")
    for param, k in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if k is not None and not 0 <= k <= max_logprobs:
            raise _invalid(param, k, f"from 0 to {max_logprobs}", "ask for fewer or raise the server's --max-logprobs")
    if params.logit_bias or params.stop_token_ids:
        _check_token_ids(params, vocab_size)


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
    for token, bias in params.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _invalid("logit_bias", f"{bias} for token {token}", f"from {-MAX_BIAS:g} to {MAX_BIAS:g}")


def _invalid(param: str, value: object, limit: str, remedy: str = "send a value in that range") -> InvalidParameter:
    shown = str(value)
    shown = shown if len(shown) <= 60 else f"{shown[:20]}... ({len(shown)} characters)"
    return InvalidParameter(f"{param} is {shown}; it must be {limit}: {remedy}", param)
