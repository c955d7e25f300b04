"""POST /v1/responses and /v1/responses/input_tokens."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import orjson

from penstock.frontend.call import Call, ModelContext, RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.requests.chat import ChatRequest, encode_messages, prepare_chat
from penstock.frontend.requests.metadata import check_metadata
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.requests.sampling import GenerationOptions, check_options, given_sampling
from penstock.frontend.responses.codec import ResponseCodec
from penstock.frontend.responses.fields import INCLUDABLE, Item, PromptFields, ResponseFields, TextFields
from penstock.frontend.responses.items import stored_items
from penstock.frontend.responses.prompt import function_tools, ignored_tools, read_grammar, read_prompt, read_tools
from penstock.frontend.storage import responses
from penstock.messages import SamplingParams

_items = msgspec.json.Decoder(list[Item])
_log = logging.getLogger("penstock.frontend")
_storage_log = logging.getLogger("penstock.storage")


async def create_response(body: bytes, context: RequestContext) -> Call:
    """Reads a request. Raises APIError 400 or 404 that names the parameter."""
    return await read_response(decode(ResponseFields, body), context, len(body))


async def read_response(fields: ResponseFields, context: RequestContext, size: int) -> Call:
    """The call of a request, whose body has `size` bytes. Raises APIError 400 or 404 that names the parameter."""
    limits = context.limits
    refuse_unsupported(fields)
    context = await context.for_model(fields.model)
    for i, name in enumerate(fields.include or ()):
        if name not in INCLUDABLE:
            where = f"include[{i}]"
            raise invalid(f"{where} is {name[:60]!r}; this server has {INCLUDABLE[0]}", where, "unsupported_parameter")
    options = GenerationOptions(seed=fields.seed, sampling=given_sampling(fields), priority=fields.priority or 0)
    check_options(options, limits)
    metadata = check_metadata(fields.metadata)
    use = read_tools(fields, context.model, limits)
    items = _own_items(fields)
    chain, earlier = await _earlier(fields, context)
    chat = ChatRequest(
        prompt=await read_prompt(fields, earlier, items, limits, use),
        options=options,
        use=use,
        grammar=read_grammar(fields),
        max_tokens=fields.max_output_tokens,
        max_tokens_param="max_output_tokens",
        drop_oldest=fields.truncation == "auto",
    )
    part, reader = await prepare_chat(context, chat, size + (0 if chain is None else chain.size))
    store = context.storage is not None and fields.store is not False
    shown = _shown_fields(fields, context, part.request.sampling, use)
    codec = ResponseCodec(context.id, {**shown, "metadata": metadata, "store": store}, reader)
    keep = partial(_keep, context, codec, chain, items) if store else None
    ignored = ignored_tools(fields)
    if ignored:
        _log.info("response resp_%s leaves out tools that this server does not have: %s", context.id, ignored)
    headers = {"x-ignored-tools": ignored} if ignored else {}
    return Call(context, (part,), codec, bool(fields.stream), "chat", keep, headers)


async def count_input_tokens(body: bytes, context: RequestContext) -> bytes:
    """The number of a prompt's tokens. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(PromptFields, body)
    refuse_unsupported(fields)
    context = await context.for_model(fields.model)
    use = read_tools(fields, context.model, context.limits)
    chain, earlier = await _earlier(fields, context)
    prompt = await read_prompt(fields, earlier, _own_items(fields), context.limits, use)
    encoded = await encode_messages(context, prompt, len(body) + (0 if chain is None else chain.size))
    return orjson.dumps({"object": "response.input_tokens", "input_tokens": len(encoded.ids)})


def _own_items(fields: PromptFields) -> list[Item]:
    given = fields.input
    items = [Item("message", role="user", content=given)] if isinstance(given, str) else given
    if not items:
        raise invalid("input is missing or empty; send a text, or at least one item", "input", "missing_parameter")
    return items


async def _earlier(fields: PromptFields, context: RequestContext) -> tuple[responses.Chain | None, Sequence[Item]]:
    """The responses that a request continues, and their items."""
    previous, storage = fields.previous_response_id, context.storage
    if previous is None:
        return None, ()
    if storage is None:
        raise invalid(
            "previous_response_id is not supported in a batch, nor by a server that stores nothing (--state-dir none); "
            "send the conversation in input",
            "previous_response_id",
            "unsupported_parameter",
        )
    _, size = await storage.run(lambda db: responses.chain_size(db, context.tenant, previous, context.limits))
    context.hold(size)
    chain = await storage.run(lambda db: responses.read_chain(db, context.tenant, previous, context.limits))
    return chain, await asyncio.to_thread(lambda: [item for array in chain.items for item in _items.decode(array)])


async def _keep(
    context: RequestContext, codec: ResponseCodec, chain: responses.Chain | None, items: Sequence[Item], end: bytes
) -> bytes:
    """Stores a complete response. If it cannot be stored, the client gets its answer all the same, and in place of
    `end` one that says so."""
    assert context.storage is not None
    response_id, expires = f"resp_{context.id}", context.created + int(context.limits.storage_seconds)

    def store(connection: Any) -> None:
        turn = responses.Turn(orjson.dumps(stored_items(items, context.id)), codec.output, codec.rest)
        responses.add(connection, context.tenant, response_id, chain, expires, turn)

    try:
        await context.storage.run(store)
    except APIError as error:
        _storage_log.error("response %s is not stored: %s", response_id, error.message)
        return codec.unstored()
    return end


def _shown_fields(
    fields: ResponseFields, context: ModelContext, sampling: SamplingParams, use: ToolUse
) -> dict[str, Any]:
    """The fields of a response that repeat its request."""
    reasoning: dict[str, str | None] = {"effort": None, "summary": None}
    if fields.reasoning is not None:
        reasoning |= {"effort": fields.reasoning.effort, "summary": fields.reasoning.summary}
    return {
        "id": f"resp_{context.id}",
        "object": "response",
        "created_at": context.created,
        "model": context.model.name,
        "background": False,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": reasoning,
        "service_tier": "default",
        "temperature": sampling.temperature,
        "text": _shown_text(fields.text),
        "tool_choice": fields.tool_choice or "auto",
        "tools": [_shown_tool(tool) for tool in function_tools(fields)],
        "top_p": sampling.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _shown_text(text: TextFields | None) -> dict[str, Any]:
    if text is None or text.format is None or text.format.type != "json_schema":
        return {"format": {"type": "text" if text is None or text.format is None else text.format.type}}
    wanted = text.format
    shown = {"type": wanted.type, "name": wanted.name or "answer", "schema": orjson.Fragment(bytes(wanted.schema))}
    return {"format": {**shown, "description": wanted.description, "strict": True}}


def _shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "description", "parameters")
    return {"type": "function", **{name: tool.get(name) for name in names}, "strict": tool.get("strict") is not False}
