"""From a client's parameters to the engine's `SamplingParams`."""

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.frontend.call import Context
from penstock.frontend.errors import invalid
from penstock.frontend.limits import Limits
from penstock.frontend.openai.protocol import UNSUPPORTED, SamplingFields
from penstock.messages import InvalidParameter, SamplingParams, check_sampling

_INT32 = 2**31 - 1


def check_common(fields: SamplingFields, limits: Limits) -> None:
    """Raises APIError 400 for what no request may ask, whatever its prompt."""
    refuse_unsupported(fields, UNSUPPORTED)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options needs stream: true; set it, or leave stream_options out", "stream_options")
    n = choices(fields)
    if not 1 <= n <= limits.max_choices:
        remedy = "send more requests instead" if n > 1 else "send at least 1"
        raise invalid(f"n is {digits(n)}; it must be from 1 to {limits.max_choices}: {remedy}", "n")
    if fields.seed is not None and not -(2**63) <= fields.seed < 2**64:
        raise invalid(f"seed is {digits(fields.seed)}; it must be an integer of 64 bits", "seed")
    for name in ("top_k", "priority"):
        value = getattr(fields, name)
        if value is not None and abs(value) > _INT32:
            raise invalid(f"{name} is {digits(value)}; it must be an integer of 32 bits", name)
    if fields.cache_salt is not None and not 0 < len(fields.cache_salt) <= 256:
        raise invalid(f"cache_salt has {len(fields.cache_salt)} characters; it must have 1 to 256", "cache_salt")
    if fields.prompt_logprobs is not None:
        check_logprobs(fields.prompt_logprobs, "prompt_logprobs", limits)
        if fields.stream:
            raise invalid(
                "prompt_logprobs is not available with stream: true; ask without streaming", "prompt_logprobs"
            )


def choices(fields: SamplingFields) -> int:
    return 1 if fields.n is None else fields.n


def check_logprobs(k: int, param: str, limits: Limits) -> None:
    if not 0 <= k <= limits.max_logprobs:
        raise invalid(f"{param} is {digits(k)}; it must be from 0 to {limits.max_logprobs}: ask for fewer", param)


def refuse_unsupported(fields: msgspec.Struct, neutral: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Raises APIError 400 for a parameter that is known but not served, unless its value asks for nothing."""
    for name, harmless in neutral.items():
        value = getattr(fields, name, None)
        if value is not None and value not in harmless:
            raise invalid(
                f"{where}{name} is not supported by this server; leave it out", where + name, "unsupported_parameter"
            )


def stop_strings(fields: SamplingFields, limits: Limits) -> tuple[str, ...]:
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    if len(stop) > limits.max_stop_strings:
        raise invalid(f"stop has {len(stop)} strings; the limit is {limits.max_stop_strings}: send fewer", "stop")
    for text in stop:
        if not 0 < len(text) <= limits.max_stop_chars:
            raise invalid(
                f"a stop string has {len(text)} characters; it must have 1 to {limits.max_stop_chars}: change it",
                "stop",
            )
    return stop


def sampling_params(
    fields: SamplingFields,
    context: Context,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """What the engine is to do for one prompt: the client's word, else the model's defaults.

    Raises APIError 400 that names the parameter.
    """
    model, limits = context.model, context.limits
    given: dict[str, Any] = dict(model.defaults)
    for name in _PASSED_ON:
        value = getattr(fields, name)
        if value is not None:
            given[name] = value
    if given.get("top_k") == -1:  # off, in vLLM
        given["top_k"] = 0
    params = SamplingParams(
        **given,
        seed=_seed(fields, context),
        max_tokens=max_tokens,
        logit_bias=_logit_bias(fields.logit_bias, limits),
        eos_token_ids=model.client.info.eos_token_ids,
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    try:
        check_sampling(params, model.client.info.vocab_size, limits.max_logprobs)
    except InvalidParameter as error:
        raise invalid(str(error), error.param) from error
    return params


# Parameters whose name and meaning are the engine's own.
_PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def _seed(fields: SamplingFields, context: Context) -> int:
    """The client's, else the server's, else one of its own: the engine always gets one."""
    given = context.seed if fields.seed is None else fields.seed
    return secrets.randbits(64) if given is None else given % 2**64


def _logit_bias(bias: dict[str, float] | None, limits: Limits) -> dict[int, float]:
    if not bias:
        return {}
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


def digits(value: int) -> str:
    """An integer for an error message, without the cost and the length of writing out a huge one."""
    return str(value) if abs(value) < 2**64 else f"an integer of {value.bit_length()} bits"
