"""What both generating routes do alike: lengths, and the parts for the engine."""

from collections.abc import Sequence

from penstock.frontend.call import Context
from penstock.frontend.errors import invalid
from penstock.frontend.generation import Part
from penstock.frontend.openai.protocol import SamplingFields
from penstock.frontend.openai.sampling import choices, digits, sampling_params, stop_strings
from penstock.frontend.prompts import check_room
from penstock.messages import GenerateRequest


def output_room(context: Context, prompt: tuple[str, int], wanted: int | None, otherwise: int, param: str) -> int:
    """Tokens that a prompt's choices may have: what is asked for, else `otherwise`, as far as the context goes.

    `prompt` is the name of its parameter and its length. Raises APIError 400 where more is asked for than fits.
    """
    model = context.model
    name, prompt_tokens = prompt
    room = check_room(model, prompt_tokens, name)
    if wanted is None:
        return min(otherwise, room)
    if wanted < 1:
        raise invalid(f"{param} is {digits(wanted)}; it must be 1 or more", param)
    if wanted > room:
        raise invalid(
            f"the maximum context length is {model.max_model_len} tokens, but {digits(wanted)} were asked for after a "
            f"prompt of {prompt_tokens}; lower {param} to {room} or shorten the prompt",
            param,
            "context_length_exceeded",
        )
    return wanted


def make_parts(
    context: Context,
    fields: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    max_tokens: Sequence[int],
    logprobs: int | None,
    prompt_logprobs: int | None,
    *,
    prompt_only: bool = False,
) -> tuple[Part, ...]:
    """One part a prompt. Raises APIError 400 that names the parameter."""
    stop = stop_strings(fields, context.limits)
    parts = []
    for i, (prompt_ids, most) in enumerate(zip(prompts, max_tokens, strict=True)):
        sampling = sampling_params(fields, context, max_tokens=most, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        request = GenerateRequest(
            request_id=f"{context.id}-{i}",
            prompt_ids=prompt_ids,
            sampling=sampling,
            n=choices(fields),
            cache_salt=context.salt(fields.cache_salt),
            tenant=context.tenant,
            priority=fields.priority or 0,
            model_revision=context.model.client.info.revision,
        )
        parts.append(
            Part(
                request,
                stop,
                include_stop=bool(fields.include_stop_str_in_output),
                skip_special_tokens=fields.skip_special_tokens is not False,
                prompt_only=prompt_only,
            )
        )
    return tuple(parts)
