"""Checks a request's generation options, and makes the engine's requests of them. Independent of the wire."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.declared.sampling import SAMPLING
from penstock.frontend.call import ModelContext
from penstock.frontend.errors import digits, invalid
from penstock.frontend.generation import PromptPart
from penstock.frontend.limits import RequestLimits
from penstock.frontend.requests.answer_size import reserve_answer
from penstock.frontend.requests.deadlines import check_timeout, deadlines
from penstock.frontend.requests.prompts import tokens_left
from penstock.messages import NEUTRAL, GenerateRequest, Grammar, InvalidParameter, SamplingParams, check_sampling

PROMPT_SPACING = 1.0  # seconds between the places of one request's prompts in the queue, so that others come between
_PASSED_ON = (*SAMPLING, "min_tokens", "ignore_eos")  # SamplingParams has them under the same names


class GenerationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a request that hold for all of its prompts. Error messages use these names."""

    n: int = 1  # choices for each prompt
    stop: tuple[str, ...] = ()
    seed: int | None = None
    sampling: Mapping[str, Any] = msgspec.field(default_factory=dict)  # fields of SamplingParams that the request sets
    logit_bias: Mapping[str, float] = msgspec.field(default_factory=dict)  # by token id, which JSON writes as a string
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int = 0
    timeout: float | None = None  # seconds to the last token
    first_token_timeout: float | None = None


def given_sampling(fields: msgspec.Struct) -> dict[str, Any]:
    """Returns the fields of SamplingParams that a request sets. Not every wire has `min_tokens` and `ignore_eos`."""
    return {name: value for name in _PASSED_ON if (value := getattr(fields, name, None)) is not None}


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns the stop strings of a request, which may send one, several or none."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def check_options(options: GenerationOptions, limits: RequestLimits) -> None:
    """Raises APIError 400 for an option that is wrong for every prompt and model."""
    n, seed, salt = options.n, options.seed, options.cache_salt
    if not 1 <= n <= limits.max_choices:
        remedy = "send more requests instead" if n > 1 else "send at least 1"
        raise invalid(f"n is {digits(n)}; it must be from 1 to {limits.max_choices}: {remedy}", "n")
    if seed is not None and not -(2**63) <= seed < 2**64:
        raise invalid(f"seed is {digits(seed)}; it must be an integer of 64 bits", "seed")
    check_priority(options.priority, limits)
    check_timeout(options.timeout, "timeout", limits.request_timeout)
    check_timeout(options.first_token_timeout, "first_token_timeout", limits.first_token_timeout)
    if salt is not None and not 0 < len(salt) <= 256:
        raise invalid(f"cache_salt has {len(salt)} characters; it must have 1 to 256", "cache_salt")


def check_priority(priority: int, limits: RequestLimits) -> None:
    """Raises APIError 400 for a priority outside the operator's range."""
    most = limits.max_priority
    if abs(priority) > most:
        raise invalid(
            f"priority is {digits(priority)}; it must be from {-most} to {most} (--max-priority): change it, or leave "
            "it out",
            "priority",
        )


def check_logprobs(k: int, param: str, limits: RequestLimits) -> None:
    """Raises APIError 400 if `k` alternatives for each token are more than the server returns."""
    if not 0 <= k <= limits.max_logprobs:
        raise invalid(f"{param} is {digits(k)}; it must be from 0 to {limits.max_logprobs}: ask for fewer", param)


def output_limit(context: ModelContext, prompt: tuple[str, int], wanted: int | None, default: int, param: str) -> int:
    """The most tokens that each choice of a prompt may have: `wanted`, or else `default` as far as the context allows.

    `prompt` is the name of the prompt's parameter and its number of tokens. Raises APIError 400 if `wanted` does not
    fit; the error names `param`.
    """
    model = context.model
    name, prompt_tokens = prompt
    left = tokens_left(model, prompt_tokens, name)
    if wanted is None:
        return min(default, left)
    if wanted < 1:
        raise invalid(f"{param} is {digits(wanted)}; it must be 1 or more", param)
    if wanted > left:
        raise invalid(
            f"the maximum context length is {model.max_model_len} tokens, but {digits(wanted)} were requested after a "
            f"prompt of {prompt_tokens}; lower {param} to {left} or shorten the prompt",
            param,
            "context_length_exceeded",
        )
    return wanted


def make_parts(
    context: ModelContext,
    options: GenerationOptions,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: Sequence[int],
    logprobs: int | None,
    prompt_logprobs: int | None,
    *,
    grammar: Grammar | None = None,
    prompt_only: bool = False,
    prediction_ids: tuple[int, ...] = (),
    shown: frozenset[int] = frozenset(),
) -> tuple[PromptPart, ...]:
    """Returns one part for each prompt. `shown` are special tokens that are not skipped.

    Raises APIError 400 that names the parameter.
    """
    _check_stop(options.stop, context.limits)
    sizes = [len(prompt) for prompt in prompts]
    reserve_answer(sizes, max_tokens, options.n, logprobs, prompt_logprobs, context)
    deadline, first_token_deadline = deadlines(context, options.timeout, options.first_token_timeout)
    parts = []
    for i, (prompt_ids, most) in enumerate(zip(prompts, max_tokens, strict=True)):
        request = GenerateRequest(
            request_id=f"{context.id}-{i}",
            prompt_ids=prompt_ids,
            sampling=_sampling_params(context, options, most, logprobs, prompt_logprobs),
            n=options.n,
            grammar=grammar,
            cache_salt=context.salt(options.cache_salt),
            tenant=context.tenant,
            priority=options.priority,
            behind=i * PROMPT_SPACING,
            arrival=time.monotonic(),
            deadline=deadline,
            first_token_deadline=first_token_deadline,
            prediction_ids=prediction_ids,
        )
        parts.append(
            PromptPart(
                request,
                options.stop,
                include_stop=options.include_stop,
                skip_special_tokens=options.skip_special_tokens,
                shown=shown,
                prompt_only=prompt_only,
            )
        )
    return tuple(parts)


def _check_stop(stop: Sequence[str], limits: RequestLimits) -> None:
    if len(stop) > limits.max_stop_strings:
        raise invalid(f"stop has {len(stop)} strings; the limit is {limits.max_stop_strings}: send fewer", "stop")
    for text in stop:
        if not 0 < len(text) <= limits.max_stop_chars:
            raise invalid(
                f"a stop string has {len(text)} characters; it must have 1 to {limits.max_stop_chars}: change it",
                "stop",
            )


def _sampling_params(
    context: ModelContext,
    options: GenerationOptions,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The engine's parameters for one prompt: what the request sets, and the model's defaults for the rest."""
    model, limits = context.model, context.limits
    seed = context.seed if options.seed is None else options.seed
    values = {**model.defaults, **options.sampling}
    for name in values.keys() & SAMPLING.keys():
        parameter = SAMPLING[name]
        if parameter.off is not None and parameter.off <= values[name] < parameter.least:
            values[name] = NEUTRAL[name]
    params = SamplingParams(
        **values,
        seed=secrets.randbits(64) if seed is None else seed % 2**64,
        max_tokens=max_tokens,
        logit_bias=_logit_bias(options.logit_bias, limits),
        eos_token_ids=model.client.info.eos_token_ids,
        stop_token_ids=options.stop_token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    try:
        check_sampling(params, model.client.info.vocab_size, limits.max_logprobs)
    except InvalidParameter as error:
        raise invalid(str(error), error.param) from error
    return params


def _logit_bias(bias: Mapping[str, float], limits: RequestLimits) -> dict[int, float]:
    if len(bias) > limits.max_logit_bias:
        raise invalid(
            f"logit_bias has {len(bias)} entries; the limit is {limits.max_logit_bias}: send fewer", "logit_bias"
        )
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise invalid(f'logit_bias has the key {key[:40]!r}; keys are token ids, such as "1234"', "logit_bias")
        result[int(key)] = value
    return result
