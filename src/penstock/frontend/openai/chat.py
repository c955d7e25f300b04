"""POST /v1/chat/completions: reads requests and encodes answers."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from penstock.frontend.answer import Codec, CollectedChoice
from penstock.frontend.call import Call, ModelContext, RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.generation import ChoiceUpdate, PromptPart, Usage
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.limits import RequestLimits
from penstock.frontend.offload import give_way
from penstock.frontend.openai.events import EventFrame, encode_failure, served_fields, usage_fields
from penstock.frontend.openai.fields import ROLES, ChatFields, ChatMessage, ContentPart, Prediction, TokenizeFields
from penstock.frontend.openai.grammar import read_grammar
from penstock.frontend.openai.logprobs import prompt_logprobs
from penstock.frontend.openai.options import read_options
from penstock.frontend.openai.tools import delta_fields, message_calls, message_fields, read_budget, read_tools
from penstock.frontend.requests.chat import ChatMessages, ChatRequest, prepare_chat
from penstock.frontend.requests.logprobs import token_logprobs
from penstock.frontend.requests.prompts import encode_text
from penstock.frontend.requests.reasoning import reasoning_variables
from penstock.frontend.requests.reply import ReplyReader
from penstock.frontend.requests.sampling import check_logprobs


async def read_chat(body: bytes, context: RequestContext) -> Call:
    """Reads a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(ChatFields, body)
    context = await context.for_model(fields.model)
    context.compare("/v1/chat/completions", fields.model, body)
    options = read_options(fields, context.limits)
    k = _top_logprobs(fields, context)
    source = read_grammar(fields)
    param, wanted = _max_tokens(fields)
    use = read_tools(fields, context.model, context.limits)
    if use.schemas and fields.ignore_eos:
        raise invalid("ignore_eos excludes tools, whose calls end with an end-of-sequence token", "ignore_eos")
    chat = ChatRequest(
        prompt=await read_messages(fields, context.limits, use.tools),
        options=options,
        use=use,
        grammar=source,
        max_tokens=wanted,
        max_tokens_param=param,
        thinking_budget=read_budget(fields, context.model),
        logprobs=k,
        prompt_logprobs=fields.prompt_logprobs,
        prediction_ids=() if fields.prediction is None else await _encode_prediction(fields.prediction, context),
    )
    part, reader = await prepare_chat(context, chat, len(body))
    return Call(context, (part,), ChatCodec(context, fields, part, reader), bool(fields.stream), "chat")


async def read_messages(
    fields: ChatFields | TokenizeFields, limits: RequestLimits, tools: Sequence[Mapping[str, Any]] | None
) -> ChatMessages:
    """The prompt of a chat, not yet rendered. `tools` have been checked. Raises APIError 400 that names the message or
    the parameter."""
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message excludes add_generation_prompt; set one to false", "continue_final_message"
        )
    messages = []
    for i, message in enumerate(fields.messages or ()):
        messages.append(_message(message, f"messages[{i}]", limits))
        await give_way(i)
    _pair_results(messages)
    return ChatMessages(
        messages=messages,
        tools=tools,
        variables=reasoning_variables(fields.reasoning_effort) | (fields.chat_template_kwargs or {}),
        add_generation_prompt=fields.add_generation_prompt is not False,
        continues=continues,
        add_special_tokens=bool(fields.add_special_tokens),
    )


def _pair_results(messages: Sequence[dict[str, Any]]) -> None:
    """Gives calls and results without an id one: a result belongs to the first call that has none yet. Raises APIError
    400 for a result of no call."""
    open_calls: list[str] = []
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{i}_{j}"
            open_calls.append(call["id"])
        if message["role"] != "tool":
            continue
        given = message["tool_call_id"] or next(iter(open_calls), None)
        if given is None:
            missing = f"messages[{i}].tool_call_id"
            raise invalid(f"{missing} is missing; send the id of the call", missing, "missing_parameter")
        message["tool_call_id"] = given
        if given in open_calls:
            open_calls.remove(given)


def _message(message: ChatMessage, where: str, limits: RequestLimits) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise invalid(f"{where}.role is {message.role[:40]!r}; it must be one of {', '.join(ROLES)}", f"{where}.role")
    refuse_unsupported(message, f"{where}.")
    content = _text(message.content, where)
    if content is None and role != "assistant":
        raise invalid(f"{where}.content is missing; send a text", f"{where}.content", "missing_parameter")
    optional: dict[str, Any] = {
        "name": message.name,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    if message.tool_calls and role == "assistant":
        optional["tool_calls"] = message_calls(message.tool_calls, where, limits)
    elif message.tool_calls:
        raise invalid(f"{where}.tool_calls is for role 'assistant'; leave it out", f"{where}.tool_calls")
    shown = {"role": role, "content": content, **{key: value for key, value in optional.items() if value is not None}}
    if role == "tool":
        shown["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        raise invalid(f"{where}.tool_call_id is for role 'tool'; leave it out", f"{where}.tool_call_id")
    return shown


async def _encode_prediction(prediction: Prediction, context: ModelContext) -> tuple[int, ...]:
    """The token ids of a predicted answer, without those that do not fit into the context."""
    if prediction.type != "content":
        raise invalid(f'prediction.type is {prediction.type[:40]!r}; it must be "content"', "prediction.type")
    text = _text(prediction.content, "prediction")
    if not text:
        return ()
    ids = await encode_text(context.model, text, add_special_tokens=False, param="prediction.content")
    return ids[: context.model.max_model_len]


def _text(content: str | list[ContentPart] | None, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            kind = f"{where}.content[{i}]"
            raise invalid(
                f'{kind} is of type {part.type[:40]!r}; this model reads {{"type": "text", "text": ...}}', kind
            )
        texts.append(part.text)
    return "\n".join(texts)


def _top_logprobs(fields: ChatFields, context: RequestContext) -> int | None:
    """The number of alternatives for each token, or None for no logprobs."""
    if fields.top_logprobs is not None:
        if fields.top_logprobs and not fields.logprobs:
            raise invalid("top_logprobs needs logprobs: true; set it, or leave top_logprobs out", "top_logprobs")
        check_logprobs(fields.top_logprobs, "top_logprobs", context.limits)
    return (fields.top_logprobs or 0) if fields.logprobs else None


def _max_tokens(fields: ChatFields) -> tuple[str, int | None]:
    """The name that the request uses for its output limit, and the limit."""
    if fields.max_completion_tokens is None:
        return "max_tokens", fields.max_tokens
    if fields.max_tokens not in (None, fields.max_completion_tokens):
        raise invalid("max_tokens and max_completion_tokens differ; send the latter only", "max_tokens")
    return "max_completion_tokens", fields.max_completion_tokens


class ChatCodec(Codec):
    def __init__(self, context: ModelContext, fields: ChatFields, part: PromptPart, reader: ReplyReader | None) -> None:
        """`reader` divides the text; without it, all text is content."""
        self._reader = reader
        self._tokenizer = context.model.tokenizer
        self._k = part.request.sampling.logprobs
        self._prompt_logprobs = fields.prompt_logprobs
        self._prompt_ids = part.request.prompt_ids
        answer_id, rest = f"chatcmpl-{context.id}", served_fields(context)
        self._fields = {"id": answer_id, "object": "chat.completion", **rest}
        event_fields = {"id": answer_id, "object": "chat.completion.chunk", **rest}
        self._frame = EventFrame(event_fields, fields.stream_options)
        self._heads = [self._frame.head(index) + b'"delta":{' for index in range(part.request.n)]

    def opening(self, usage: Usage) -> bytes:
        """One event with the role for each choice."""
        role = b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        tail = self._frame.tail(Usage(usage.prompt_tokens))
        return b"".join(head + role + tail for head in self._heads)

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        if self._reader is not None:
            return self._divided_chunk(self._reader, update, usage)
        head, tail = self._heads[update.choice], self._frame.tail(usage)
        event = b""
        if update.text or update.logprobs:
            logprobs = b"null" if self._k is None else orjson.dumps(self._logprobs(update.logprobs))
            text = orjson.dumps(update.text)
            event = b"".join((head, b'"content":', text, b'},"logprobs":', logprobs, b',"finish_reason":null', tail))
        if update.finish_reason is not None:
            reason = orjson.dumps(update.finish_reason)
            event += b"".join((head, b'},"logprobs":null,"finish_reason":', reason, tail))
        return event

    def _divided_chunk(self, reader: ReplyReader, update: ChoiceUpdate, usage: Usage) -> bytes:
        """One event for each part of the update. The logprobs are those of all its tokens, in the first event."""
        reason = update.finish_reason
        parts = reader.read(update.choice, update.text, update.offsets, ended=reason is not None)
        usage.reasoning_tokens = reader.reasoning_tokens
        start = self._heads[update.choice].removesuffix(b"{")
        tail = self._frame.tail(usage)
        deltas = [delta_fields(part) for part in parts] or ([{}] if update.logprobs else [])
        events = []
        for i, delta in enumerate(deltas):
            logprobs = None if self._k is None else self._logprobs(update.logprobs if not i else b"")
            events.append(start + orjson.dumps(delta) + b',"logprobs":' + orjson.dumps(logprobs))
            events.append(b',"finish_reason":null' + tail)
        if reason is not None:
            shown = orjson.dumps(reader.finish_reason(update.choice, reason))
            events.append(start + b'{},"logprobs":null,"finish_reason":' + shown + tail)
        return b"".join(events)

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage)

    def failure(self, error: APIError) -> bytes:
        return encode_failure(error)

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        choices = [self._choice(answer) for answer in answers]
        if self._reader is not None:
            usage.reasoning_tokens = self._reader.reasoning_tokens
        answer = {**self._fields, "choices": choices, "usage": usage_fields(usage)}
        if self._prompt_logprobs is not None:
            packed = answers[0].prompt_logprobs
            answer["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, self._prompt_ids, packed, self._prompt_logprobs
            )
        return orjson.dumps(answer)

    def _choice(self, answer: CollectedChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        reason: str | None = answer.finish_reason
        if self._reader is not None:
            message = message_fields(self._reader.read(answer.choice, answer.text, answer.offsets, ended=True))
            if answer.finish_reason is not None:
                reason = self._reader.finish_reason(answer.choice, answer.finish_reason)
        return {
            "index": answer.choice,
            "message": message,
            "logprobs": None if self._k is None else self._logprobs(answer.logprobs),
            "finish_reason": reason,
        }

    def _logprobs(self, packed: bytes | bytearray) -> dict[str, Any]:
        content = [] if self._k is None else token_logprobs(self._tokenizer, packed, self._k)
        return {"content": content, "refusal": None}
