"""Bounds the size of an answer before its request is admitted.

Each parameter has a limit of its own, but a few kilobytes of request could demand their product: prompts x choices x
tokens x alternatives.
"""

from collections.abc import Sequence

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import invalid
from penstock.frontend.limits import RequestLimits

TOKEN_BYTES = 8  # of a token's text in an answer
ROW_BYTES = 100  # of a log-probability with its token


def reserve_answer(
    prompts: Sequence[int],
    max_tokens: Sequence[int],
    n: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    context: RequestContext,
) -> None:
    """Counts the bytes that the answer will have for its prompts in the budget of answers.

    Raises APIError 400 if the answer could have more bytes than the limit, and 429 if the budget is spent.
    `prompts` and `max_tokens` are the numbers of tokens of each prompt, and of each of its choices. `logprobs` and
    `prompt_logprobs` are the numbers of alternatives, or None.
    """
    limits = context.limits
    bytes_each = _token_bytes(logprobs)
    bytes_each_prompt = _token_bytes(prompt_logprobs) - TOKEN_BYTES
    certain = n * sum(prompts) * bytes_each_prompt
    size = n * sum(max_tokens) * bytes_each + certain
    if size <= limits.max_answer_bytes:
        context.reserve(certain)
        return
    product = [f"{len(prompts)} prompts", f"n = {n}", f"up to {max(max_tokens)} tokens"]
    if logprobs is not None:
        product.append(f"{logprobs + 1} log-probabilities")
    if prompt_logprobs is not None:
        product[2] += f" after {max(prompts)} of a prompt with {prompt_logprobs + 1} log-probabilities each"
    raise invalid(
        f"{' x '.join(product)} is an answer of up to {size} bytes; the limit is {limits.max_answer_bytes} "
        "(--max-answer-size): lower n, the tokens or the logprobs, or send fewer prompts at a time",
        "n" if logprobs is None and prompt_logprobs is None else "logprobs",
        "answer_too_large",
    )


def check_echo_size(chars: int, n: int, limits: RequestLimits) -> None:
    """Raises APIError 400 if the prompts, with `chars` characters in total, are too long to be repeated `n` times."""
    if chars * n > limits.max_answer_bytes:
        raise invalid(
            f"echo with n = {n} repeats {chars} characters of prompts {n} times; the limit is "
            f"{limits.max_answer_bytes} bytes (--max-answer-size): lower n, or send fewer prompts at a time",
            "echo",
            "answer_too_large",
        )


def most_tokens(n: int, logprobs: int | None, limits: RequestLimits) -> int:
    """The most tokens of each of `n` choices that fit in an answer. It replaces a missing max_tokens."""
    return max(limits.max_answer_bytes // (n * _token_bytes(logprobs)), 1)


def _token_bytes(logprobs: int | None) -> int:
    return TOKEN_BYTES + (0 if logprobs is None else (logprobs + 1) * ROW_BYTES)
