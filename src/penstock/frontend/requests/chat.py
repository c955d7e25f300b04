"""Prepares a chat for the engine: prompt, grammar, limit, and the reader of its answer. Independent of the wire."""

from collections.abc import Awaitable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.frontend.call import ModelContext
from penstock.frontend.errors import invalid
from penstock.frontend.generation import PromptPart
from penstock.frontend.requests.answer_size import most_tokens
from penstock.frontend.requests.context_policy import (
    ANSWER_PART,
    INSTRUCTION,
    ContextRoom,
    LeftOut,
    Messages,
    Summary,
    encode_newest,
    encode_summarised,
)
from penstock.frontend.requests.grammar import GrammarSource, check_grammar
from penstock.frontend.requests.infill import encode_infill, infill_ends
from penstock.frontend.requests.prompts import encode_chat, encode_text, tokens_left
from penstock.frontend.requests.reasoning import reasoning_variables
from penstock.frontend.requests.reply import ReplyReader, TextReplyReader, ToolUse, reply_grammar
from penstock.frontend.requests.sampling import GenerationOptions, make_parts, output_limit
from penstock.frontend.requests.summary import write_summary
from penstock.text.prompts import Encoded

_BILLING = "x-anthropic-billing-header:"
_TEMPLATE_OWN = frozenset(("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"))


class ChatMessages(msgspec.Struct, frozen=True, kw_only=True):
    messages: Sequence[Mapping[str, Any]]  # in OpenAI's form, checked
    tools: Sequence[Mapping[str, Any]] | None = None  # in OpenAI's form, checked
    variables: Mapping[str, Any] = msgspec.field(default_factory=dict)  # of the chat template
    add_generation_prompt: bool = True
    continues: bool = False  # the answer goes on where the last message ends
    add_special_tokens: bool = False
    earlier_ids: tuple[int, ...] = ()  # tokens before the messages
    plain: bool = False  # the one message is a text that the model continues, without its chat template
    suffix: str = ""  # of a plain text: what follows the answer
    last_tokens: int | None = None  # of a plain text, to which it is cut; None: it is not cut
    param: str = "messages"  # the prompt's name in errors


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A chat as a wire has read it."""

    prompt: ChatMessages
    options: GenerationOptions
    use: ToolUse
    grammar: GrammarSource | None = None
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"  # its name in errors
    drop_oldest: bool = False  # oldest turns may be left out if the prompt is too long
    shorten: bool = False  # a limit beyond the context is lowered, instead of refused
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prediction_ids: tuple[int, ...] = ()
    thinking_budget: int | None = None  # checked; None: the server's own


class PreparedChat(NamedTuple):
    """The engine's request of a chat, and the reader of its answer. Without a reader, all text is content."""

    part: PromptPart
    reader: ReplyReader | None


async def prepare_chat(context: ModelContext, chat: ChatRequest, body_size: int) -> PreparedChat:
    """Returns what runs a chat. `body_size` is that of the request in bytes. Raises APIError 400 for a parameter."""
    model, limits, use, options = context.model, context.limits, chat.use, chat.options
    if model.remote is not None:
        check_messages(chat.prompt)
        if chat.drop_oldest:
            raise invalid(f"truncation: model {model.name!r} is at a provider; shorten the input", "truncation")
        return await model.remote.prepare(context, chat)
    prompt, left_out = await _encode(context, chat, body_size)
    wanted = chat.max_tokens
    if wanted is not None and chat.shorten:
        wanted = min(wanted, tokens_left(model, len(prompt.ids), chat.prompt.param))
    limit = output_limit(
        context,
        (chat.prompt.param, len(prompt.ids)),
        wanted,
        most_tokens(options.n, chat.logprobs, limits),
        chat.max_tokens_param,
    )
    if chat.prompt.suffix:
        options = replace(options, stop_token_ids=options.stop_token_ids + infill_ends(model))
    reader, shown = None, frozenset[int]()
    if not chat.prompt.plain and (use.schemas or model.chat_format.reasoning is not None):
        reader = TextReplyReader(model, use, prompt.end, options.n, limits)
        shown = model.chat_format.shown(tools=bool(use.schemas))
    budget = model.thinking_budget if chat.thinking_budget is None else chat.thinking_budget
    if chat.prompt.plain:
        grammar = None if chat.grammar is None else await check_grammar(model, chat.grammar)
    else:
        grammar = await reply_grammar(model, use, chat.grammar, prompt.end, body_size, budget)
    (part,) = make_parts(
        context,
        options,
        [prompt.ids],
        [limit],
        chat.logprobs,
        chat.prompt_logprobs,
        prediction_ids=chat.prediction_ids,
        grammar=grammar,
        shown=shown,
    )
    return PreparedChat(replace(part, left_out=left_out), reader)


async def _encode(context: ModelContext, chat: ChatRequest, body_size: int) -> tuple[Encoded, LeftOut]:
    """Returns the prompt, and which messages are not in it. Raises APIError 400."""
    policy, _, summariser = context.limits.context_policy.partition(":")
    if chat.prompt.plain or (policy == "error" and not chat.drop_oldest):
        return await encode_messages(context, chat.prompt, body_size), LeftOut()

    def encode(messages: Messages) -> Awaitable[Encoded]:
        return encode_messages(context, replace(chat.prompt, messages=messages), body_size)

    length = context.model.max_model_len
    wanted = chat.max_tokens or length
    if chat.max_tokens is None or chat.shorten:
        wanted = min(wanted, length // ANSWER_PART)
    room = ContextRoom(encode, length, wanted)
    if not summariser:
        encoded, dropped = await encode_newest(chat.prompt.messages, *room)
        return encoded, LeftOut(dropped)

    def write(messages: Messages, most: int) -> Awaitable[Summary]:
        return write_summary(context, summariser, partial(_prepare_summary, chat, messages, most, body_size))

    owner = f"{context.salt(chat.options.cache_salt)} {summariser} {chat.prompt.tools}"
    return await encode_summarised(chat.prompt.messages, room, write, context.models.summaries, owner)


async def _prepare_summary(
    chat: ChatRequest, messages: Messages, most: int, body_size: int, context: ModelContext
) -> PreparedChat:
    """Returns what summarises messages of a chat in at most so many tokens. The messages are as in the chat, so that
    the model of the chat has them in its prefix cache."""
    here, given = context.model.remote is None, chat.options
    prompt = replace(
        chat.prompt,
        messages=[*messages, {"role": "user", "content": INSTRUCTION}],
        variables={**chat.prompt.variables, **reasoning_variables("none")} if here else {},
        add_generation_prompt=True,
        continues=False,
    )
    options = GenerationOptions(
        sampling={"temperature": 0.0} if here else {}, cache_salt=given.cache_salt, priority=given.priority
    )
    question = ChatRequest(
        prompt=prompt,
        options=options,
        use=ToolUse(),
        max_tokens=most,
        shorten=True,
        drop_oldest=here,
        thinking_budget=0 if here else None,
    )
    return await prepare_chat(context, question, body_size)


def plain_text(text: str, param: str, suffix: str = "", last_tokens: int | None = None) -> ChatMessages:
    """Returns the prompt of a text that the model continues. See ChatMessages."""
    message = {"role": "user", "content": text}
    return ChatMessages(messages=[message], plain=True, suffix=suffix, last_tokens=last_tokens, param=param)


def check_messages(prompt: ChatMessages) -> None:
    """Raises APIError 400 for no messages, an empty text, or a variable that is a parameter."""
    if not prompt.messages:
        raise invalid(f"{prompt.param} is empty; send at least one message", prompt.param, "empty_prompt")
    if prompt.plain and not prompt.suffix and not prompt.messages[0]["content"]:
        raise invalid(f"{prompt.param} is empty; send at least one character", prompt.param, "empty_prompt")
    if reserved := _TEMPLATE_OWN & prompt.variables.keys():
        name = f"chat_template_kwargs.{min(reserved)}"
        raise invalid(f"{name} is set by the server; use the request's own parameter {min(reserved)} instead", name)


async def encode_messages(context: ModelContext, prompt: ChatMessages, body_size: int) -> Encoded:
    """Returns the prompt of a chat. Raises APIError 400 that names the message or the parameter."""
    check_messages(prompt)
    if prompt.plain:
        model, text = context.model, prompt.messages[0]["content"]
        if prompt.suffix:
            ids = await encode_infill(model, text, prompt.suffix, add_special_tokens=True)
        else:
            ids = await encode_text(model, text, add_special_tokens=True, param=prompt.param)
        return Encoded(ids if prompt.last_tokens is None else ids[-prompt.last_tokens :], "")
    encoded = await encode_chat(
        context.model,
        _without_volatile_head(prompt.messages),
        add_generation_prompt=prompt.add_generation_prompt and not prompt.continues,
        continue_final_message=prompt.continues,
        add_special_tokens=prompt.add_special_tokens,
        variables=prompt.variables,
        tools=prompt.tools,
        body_size=body_size,
        param=prompt.param,
    )
    return Encoded(prompt.earlier_ids + encoded.ids, encoded.end)


def _without_volatile_head(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The messages without the line that Claude Code puts before its system prompt. The line is meant for Anthropic's
    servers, and another one in every request: the prompt would be cached up to there only."""
    first = messages[0]
    if first["role"] != "system" or not (first["content"] or "").startswith(_BILLING):
        return messages
    content = first["content"].partition("\n")[2].lstrip("\n")
    return [{**first, "content": content}, *messages[1:]] if content or len(messages) == 1 else messages[1:]
