"""Turns prompts into token ids, within the model's context length. Long ones are encoded off the event loop."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from penstock.frontend.errors import APIError, ContextOverflow, digits, invalid
from penstock.frontend.offload import offload_if_large
from penstock.frontend.served import ServedModel
from penstock.text import ChatTemplateError, TokenizerError
from penstock.text.process import WorkerEnded
from penstock.text.prompts import EncodeChat, Encoded, EncodeText, PromptQuestion, PromptTooLong, PromptTooSlow

LARGE = 1 << 16  # characters, or bytes of a chat's body, up to which a prompt takes at most about 0.1 s
MAX_WAITING = 32  # large prompts


async def encode_text(
    model: ServedModel, text: str, *, add_special_tokens: bool, param: str, most: int = 0
) -> tuple[int, ...]:
    """The token ids of a prompt. Raises APIError 400 for text that is empty, that has clearly too many
    tokens, or that is not valid Unicode. `most` tokens are encoded, or two contexts if that is more."""
    if not text:
        raise invalid(f"{param} is empty; send at least one character", param, "empty_prompt")
    question, size = EncodeText(text, add_special_tokens, most), len(text)
    ids = (await encode_prompt(model, question, size, param, chars=size)).ids
    if not ids:
        raise invalid(f"{param} has no tokens; send text that has at least one", param, "empty_prompt")
    return ids


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
    param: str,
) -> Encoded:
    """The prompt of messages, rendered with the model's chat template.

    Raises APIError 400 if the model has no template or the template refuses the messages. `body_size` is the size of
    the request's body in bytes: rendering takes time for empty messages and for variables, too.
    """
    _check_here(model, param)
    if model.tokenizer.chat_template is None:
        raise invalid(f"model {model.name!r} has no chat template; use /v1/completions", param, "no_chat_template")
    question = EncodeChat(messages, tools, add_generation_prompt, continue_final_message, add_special_tokens, variables)
    size = sum(len(message["content"] or "") for message in messages)
    return await encode_prompt(model, question, body_size, param, chars=size)


async def encode_prompt(
    model: ServedModel, question: PromptQuestion, size: int, param: str, *, chars: int = 0
) -> Encoded:
    """The token ids of a prompt of so many characters; `size` is the amount of work. Raises APIError 400.

    Large ones are encoded in a process that is killed when it takes too long.
    """
    _check_here(model, param)
    try:
        model.encoder.check_length(chars)
        if size <= LARGE:
            return await offload_if_large(partial(model.encoder.encode, question), size)
        if model.large_prompts.waiting >= MAX_WAITING:
            raise APIError(429, f"{MAX_WAITING} large prompts wait to be tokenised; send it again later", retry_after=1)
        return await model.large_prompts.in_thread(partial(model.prompt_workers.encode, question))
    except PromptTooLong as error:
        raise ContextOverflow(param, error.tokens, model.max_model_len, counted=False) from error
    except PromptTooSlow as error:
        raise invalid(f"{param} {error}", param, "prompt_too_slow") from error
    except WorkerEnded as error:
        raise APIError(503, f"{param} was not tokenised: {error}; send it again later", retry_after=1) from error
    except (ChatTemplateError, TokenizerError) as error:
        raise invalid(f"{param}: {error}", param) from error


def check_ids(model: ServedModel, ids: Sequence[int], param: str, *, output: int = 1) -> tuple[int, ...]:
    """Checks token ids that a client sent. Raises APIError 400 for no ids, too many ids to leave room for `output` more
    tokens, or ids out of range."""
    _check_here(model, param)
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
        raise ContextOverflow(param, prompt_tokens, model.max_model_len)
    return left


def _check_here(model: ServedModel, param: str) -> None:
    """Raises APIError 400 for a model at a provider, whose tokenizer is not here."""
    if model.remote is not None:
        where = f"{param}: model {model.name!r} is at a provider, and its tokenizer is not here"
        message = f"{where}; send a text, to a route that answers it"
        raise invalid(message, param, "no_tokenizer")
