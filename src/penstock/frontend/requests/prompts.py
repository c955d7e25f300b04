"""Turns prompts into token ids, within the model's context length. Long ones are encoded off the event loop."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from penstock.frontend.errors import digits, invalid
from penstock.frontend.offload import offload_if_large
from penstock.frontend.served import ServedModel
from penstock.text import ChatTemplateError, TokenizerError

CHARS_PER_TOKEN = 256  # longer than any token of the usual vocabularies: a longer text cannot fit
_COUNTED_CHARS = 8  # characters for each token of the context: a longer text is counted before it is encoded
_PIECE = 1 << 16  # characters
_END_CHARS = 64  # longer than any marker


class ChatPrompt(NamedTuple):
    """The prompt of a chat."""

    ids: tuple[int, ...]
    end: str  # the end of its text, which may begin the model's reasoning


async def encode_text(
    model: ServedModel, text: str, *, add_special_tokens: bool, param: str, most: int = 0
) -> tuple[int, ...]:
    """The token ids of a prompt. Raises APIError 400 for text that is empty, that has clearly too many
    tokens, or that is not valid Unicode. `most` tokens are encoded, or two contexts if that is more."""
    if not text:
        raise invalid(f"{param} is empty; send at least one character", param, "empty_prompt")
    check_length(model, len(text), param)

    def encode() -> list[int]:
        _check_tokens(model, text, param, most)
        return model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    try:
        ids = await offload_if_large(encode, len(text))
    except TokenizerError as error:
        raise invalid(f"{param}: {error}", param) from error
    if not ids:
        raise invalid(f"{param} has no tokens; send text that has at least one", param, "empty_prompt")
    return tuple(ids)


async def encode_chat(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
    variables: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    body_size: int,
) -> ChatPrompt:
    """The prompt of messages, rendered with the model's chat template.

    Raises APIError 400 if the model has no template or the template refuses the messages. `body_size` is the size of
    the request's body in bytes: rendering takes time for empty messages and for variables, too.
    """
    if model.tokenizer.chat_template is None:
        raise invalid(f"model {model.name!r} has no chat template; use /v1/completions", "messages", "no_chat_template")
    size = sum(len(message["content"] or "") for message in messages)
    check_length(model, size, "messages")

    def encode() -> ChatPrompt:
        prompt = model.conversation.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
        check_length(model, len(prompt), "messages")
        _check_tokens(model, prompt, "messages", 0)
        ids = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        return ChatPrompt(tuple(ids), prompt[-_END_CHARS:])

    try:
        return await offload_if_large(encode, body_size)
    except (ChatTemplateError, TokenizerError) as error:
        raise invalid(f"messages: {error}", "messages") from error


def check_ids(model: ServedModel, ids: Sequence[int], param: str, *, output: int = 1) -> tuple[int, ...]:
    """Checks token ids that a client sent. Raises APIError 400 for no ids, too many ids to leave room for `output` more
    tokens, or ids out of range."""
    if not ids:
        raise invalid(f"{param} is empty; send at least one token id", param, "empty_prompt")
    tokens_left(model, len(ids) - 1 + output, param)  # first, as the next checks walk over all ids
    vocab_size = model.client.info.vocab_size
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise invalid(f"{param} has token id {digits(bad)}; ids of {model.name!r} are 0 to {vocab_size - 1}", param)
    return tuple(ids)


def tokens_left(model: ServedModel, prompt_tokens: int, param: str) -> int:
    """The number of tokens that fit after a prompt. Raises APIError 400 if none do."""
    left = model.max_model_len - prompt_tokens
    if left < 1:
        raise invalid(
            f"the maximum context length is {model.max_model_len} tokens, but {param} has {prompt_tokens} tokens: "
            "none are left for an answer; shorten it",
            param,
            "context_length_exceeded",
        )
    return left


def _check_tokens(model: ServedModel, text: str, param: str, most: int) -> None:
    """Refuses a text of far too many tokens before all of it is encoded: a thread that encodes cannot be stopped, and
    4 MiB of digits take it 8 s. A text that is cut into pieces has about as many tokens, so two contexts are left.
    """
    if len(text) <= _COUNTED_CHARS * model.max_model_len:
        return
    count, most = 0, max(most, 2 * model.max_model_len)
    for start in range(0, len(text), _PIECE):
        count += len(model.tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
        if count > most:
            raise invalid(
                f"{param} has more than {most} tokens, and the maximum context length is {model.max_model_len}; "
                "shorten it",
                param,
                "context_length_exceeded",
            )


def check_length(model: ServedModel, chars: int, param: str) -> None:
    """Raises APIError 400 for a text that cannot fit, before it is tokenised."""
    limit = CHARS_PER_TOKEN * model.max_model_len
    if chars > limit:
        raise invalid(
            f"{param} has {chars} characters, more than the {limit} that could fit in the maximum context length of "
            f"{model.max_model_len} tokens; shorten it",
            param,
            "context_length_exceeded",
        )
