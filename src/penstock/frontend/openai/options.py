"""Turns OpenAI's and vLLM's parameters into generation options."""

from penstock.frontend.errors import invalid
from penstock.frontend.http.body import refuse_unsupported
from penstock.frontend.limits import RequestLimits
from penstock.frontend.openai.fields import SamplingFields
from penstock.frontend.requests.sampling import (
    GenerationOptions,
    check_logprobs,
    check_options,
    given_sampling,
    stop_strings,
)


def read_options(fields: SamplingFields, limits: RequestLimits) -> GenerationOptions:
    """The options of a request. Raises APIError 400 for a parameter that is wrong for every prompt."""
    refuse_unsupported(fields)
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options needs stream: true; set it, or leave stream_options out", "stream_options")
    options = GenerationOptions(
        n=1 if fields.n is None else fields.n,
        stop=stop_strings(fields.stop),
        seed=fields.seed,
        sampling=given_sampling(fields),
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
