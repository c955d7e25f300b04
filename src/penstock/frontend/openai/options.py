"""Turns OpenAI's and vLLM's parameters into generation options."""

from penstock.frontend.errors import invalid
from penstock.frontend.http.body import refuse_unsupported
from penstock.frontend.limits import RequestLimits
from penstock.frontend.openai.fields import SamplingFields
from penstock.frontend.requests.sampling import GenerationOptions, check_logprobs, check_options

# Parameters that SamplingParams has under the same name and with the same meaning.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def read_options(fields: SamplingFields, limits: RequestLimits) -> GenerationOptions:
    """The options of a request. Raises APIError 400 for a parameter that is wrong for every prompt."""
    refuse_unsupported(fields)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options needs stream: true; set it, or leave stream_options out", "stream_options")
    options = GenerationOptions(
        n=1 if fields.n is None else fields.n,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        seed=fields.seed,
        sampling={name: value for name in _SAMPLING if (value := getattr(fields, name)) is not None},
        logit_bias=fields.logit_bias or {},
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        cache_salt=fields.cache_salt,
        priority=fields.priority or 0,
        timeout=fields.timeout,
        first_token_timeout=fields.first_token_timeout,
    )
    check_options(options, limits)
    if fields.prompt_logprobs is not None:
        check_logprobs(fields.prompt_logprobs, "prompt_logprobs", limits)
        if fields.stream:
            raise invalid(
                "prompt_logprobs is not available with stream: true; ask without streaming", "prompt_logprobs"
            )
    return options
