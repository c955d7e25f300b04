"""Reads the tools of chat requests, and writes tool calls and reasoning as OpenAI does."""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.frontend.errors import invalid
from penstock.frontend.limits import RequestLimits
from penstock.frontend.openai.fields import ChatFields, MessageToolCall
from penstock.frontend.requests.reasoning import check_budget
from penstock.frontend.requests.reply import ToolUse, join_parts
from penstock.frontend.requests.tools import check_arguments, check_calls, check_tools, read_choice, use_tools
from penstock.frontend.served import ServedModel
from penstock.text.calls import Part


def read_tools(fields: ChatFields, model: ServedModel, limits: RequestLimits) -> ToolUse:
    """Returns the tools that the answer may call. Raises APIError 400 that names the parameter."""
    tools = check_tools(fields.tools, limits)
    choice, name = read_choice(fields.tool_choice, "function")
    return use_tools(model, tools, choice, name, parallel=fields.parallel_tool_calls is not False)


def message_calls(calls: Sequence[MessageToolCall], where: str, limits: RequestLimits) -> list[dict[str, Any]]:
    """Returns the calls of an earlier answer; an id may be missing. Raises APIError 400 for too many, or arguments that
    are too long."""
    check_calls(len(calls), f"{where}.tool_calls", limits)
    result = []
    for i, call in enumerate(calls):
        name = f"{where}.tool_calls[{i}]"
        if call.type not in (None, "function"):
            raise invalid(f'{name}.type is {call.type[:40]!r}; it must be "function"', f"{name}.type")
        arguments = call.function.arguments
        if isinstance(arguments, str):
            check_arguments(arguments, f"{name}.function.arguments", limits)
        function = {"name": call.function.name, "arguments": arguments}
        result.append({"id": call.id, "type": "function", "function": function})
    return result


def read_budget(fields: ChatFields, model: ServedModel) -> int | None:
    """Returns how many tokens of an answer may be reasoning; None: as the server allows. Raises APIError 400."""
    if fields.thinking_budget is None:
        return check_budget(fields.thinking_token_budget, "thinking_token_budget", model)
    if fields.thinking_token_budget not in (None, fields.thinking_budget):
        raise invalid("thinking_budget and thinking_token_budget differ; send one of them", "thinking_budget")
    return check_budget(fields.thinking_budget, "thinking_budget", model)


def delta_fields(part: Part) -> dict[str, Any]:
    """Returns the `delta` of a stream's event for one part."""
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            return {"reasoning_content": part.text, "reasoning": part.text}
        case "call":
            function = {"name": part.text, "arguments": ""}
            return {"tool_calls": [{"index": part.call, "id": part.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


def message_fields(parts: Iterable[Part]) -> dict[str, Any]:
    """Returns the `message` of a whole answer."""
    blocks = join_parts(parts)
    text = "".join(block.text for block in blocks if block.kind == "content")
    reasoning = "".join(block.text for block in blocks if block.kind == "reasoning")
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.text}}
        for block in blocks
        if block.kind == "call"
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        message |= dict.fromkeys(("reasoning_content", "reasoning"), reasoning)
    if calls:
        message["tool_calls"] = calls
    return message
