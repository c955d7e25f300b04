"""POST /api/chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import invalid
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.limits import RequestLimits
from penstock.frontend.offload import give_way
from penstock.frontend.ollama.codec import OllamaCodec
from penstock.frontend.ollama.fields import ROLES, ChatFields, Message
from penstock.frontend.ollama.options import answer_nothing, enter_model, read_request, read_think
from penstock.frontend.requests.chat import ChatMessages, prepare_chat
from penstock.frontend.requests.tools import check_arguments, check_calls, check_tools, to_json, use_tools


async def read_chat(body: bytes, context: RequestContext) -> Call | Answer:
    """Reads a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(ChatFields, body)
    if not fields.messages:
        return await answer_nothing(fields, {"message": {"role": "assistant", "content": ""}}, context)
    context = await enter_model(context, fields.model, fields.keep_alive)
    tools = check_tools(fields.tools, context.limits)
    use = use_tools(context.model, tools, "auto", "", parallel=True)
    last = fields.messages[-1]
    messages = ChatMessages(
        messages=await _messages(fields.messages, context.limits),
        tools=use.tools,
        variables=read_think(fields),
        continues=last.role == "assistant" and not last.tool_calls,
    )
    chat = read_request(fields, messages, use, context.limits)
    part, reader = await prepare_chat(context, chat, len(body))
    codec = OllamaCodec(context, fields.model, part, reader, chat=True, thinking=fields.think is not False)
    return Call(context, (part,), codec, fields.stream is not False, "chat")


async def _messages(messages: Sequence[Message], limits: RequestLimits) -> list[Mapping[str, Any]]:
    """The messages in OpenAI's form. Ollama's results of tools name the tool, and OpenAI's the call."""
    result: list[Mapping[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # ids and names of calls without a result
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        refuse_unsupported(message, f"{where}.")
        fields: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        match message.role:
            case "assistant":
                if message.thinking:
                    fields["reasoning_content"] = message.thinking
                if message.tool_calls:
                    fields["tool_calls"] = calls = _calls(message, i, limits)
                    open_calls = [(call["id"], call["function"]["name"]) for call in calls]
            case "tool":
                fields |= _result(message, open_calls)
            case "system" | "user":
                pass
            case role:
                raise invalid(f"{where}.role is {role[:40]!r}; it must be one of {', '.join(ROLES)}", f"{where}.role")
        result.append(fields)
        await give_way(i)
    return result


def _calls(message: Message, number: int, limits: RequestLimits) -> list[dict[str, Any]]:
    where = f"messages[{number}].tool_calls"
    given = message.tool_calls or []
    check_calls(len(given), where, limits)
    calls = []
    for i, call in enumerate(given):
        place = f"{where}[{i}].function.arguments"
        arguments = check_arguments(to_json(call.function.arguments or {}, place).decode(), place, limits)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id or f"call_{number}_{i}", "type": "function", "function": function})
    return calls


def _result(message: Message, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """The call that a result belongs to: the named one, or the first one without a result, which is taken off."""
    for i, (call_id, name) in enumerate(open_calls):
        named = message.tool_call_id or message.tool_name
        if named in (None, call_id, name):
            del open_calls[i]
            return {"tool_call_id": call_id, "name": name}
    name = message.tool_name or "tool"
    return {"tool_call_id": message.tool_call_id or name, "name": name}
