"""Reads the tools of chat requests, and writes tool calls and reasoning as OpenAI does."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson

from penstock.frontend.errors import digits, invalid
from penstock.frontend.limits import RequestLimits
from penstock.frontend.openai.fields import ChatFields, MessageToolCall
from penstock.frontend.reply import ToolUse
from penstock.frontend.served import ServedModel
from penstock.text.calls import Part

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CHOICES: Mapping[str, Literal["none", "auto", "required"]] = {"none": "none", "auto": "auto", "required": "required"}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def read_tools(fields: ChatFields, model: ServedModel, limits: RequestLimits) -> ToolUse:
    """Returns the tools that the answer may call. Raises APIError 400 that names the parameter."""
    tools = check_tools(fields.tools, limits)
    choice, name = _choice(fields.tool_choice, tools)
    parallel = fields.parallel_tool_calls is not False
    if choice == "none":
        return ToolUse()
    if model.conversation.tools is None:
        raise invalid(
            "tools is not supported: the server was started with --tool-format none; leave it out",
            "tools",
            "unsupported_parameter",
        )
    return ToolUse(
        tools=list(tools.values()),
        schemas={key: tool["function"].get("parameters") or {} for key, tool in tools.items()},
        choice=choice,
        name=name,
        parallel=parallel,
    )


def check_tools(tools: Sequence[dict[str, Any]] | None, limits: RequestLimits) -> dict[str, dict[str, Any]]:
    """Returns the tools by name. Raises APIError 400 that names the tool and what is wrong with it."""
    if not tools:
        return {}
    if len(tools) > limits.max_tools:
        raise invalid(f"tools has {len(tools)} tools; the limit is {limits.max_tools}: send fewer", "tools")
    size = len(orjson.dumps(tools))
    if size > limits.max_tool_bytes:
        raise invalid(
            f"tools has {size} bytes of JSON; the limit is {limits.max_tool_bytes}: send less",
            "tools",
        )
    known: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        where = f"tools[{i}]"
        if tool.get("type", "function") != "function":
            raise invalid(f'{where}.type is {str(tool["type"])[:40]!r}; it must be "function"', f"{where}.type")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(f"{where}.function is missing; send an object with a name", f"{where}.function")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise invalid(
                f"{where}.function.name is {str(name)[:80]!r}; it must have 1 to 64 letters, digits, '_', '-' or '.'",
                f"{where}.function.name",
            )
        if name in known:
            raise invalid(f"{where}.function.name is {name!r}, as that of another tool; rename it", "tools")
        for key, kind, word in (("description", str, "a string"), ("parameters", dict, "an object: a JSON schema")):
            if function.get(key) is not None and not isinstance(function[key], kind):
                raise invalid(f"{where}.function.{key} must be {word}", f"{where}.function.{key}")
        kind = (function.get("parameters") or {}).get("type", "object")
        if kind != "object":
            where = f"{where}.function.parameters.type"
            raise invalid(f'{where} is {str(kind)[:40]!r}; it must be "object"', where)
        known[name] = {"type": "function", **tool}
    return known


def _choice(
    choice: str | dict[str, Any] | None, tools: Mapping[str, Any]
) -> tuple[Literal["none", "auto", "required", "named"], str]:
    """Returns the choice, and the name of the tool if it is a named one."""
    if choice is None:
        return ("auto", "") if tools else ("none", "")
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise invalid(
                f"tool_choice is {choice[:40]!r}; it must be none, auto, required, or "
                '{"type": "function", "function": {"name": ...}}',
                "tool_choice",
            )
        if choice == "required" and not tools:
            raise invalid("tool_choice is 'required', but there are no tools; send tools", "tool_choice")
        return (_CHOICES[choice], "") if tools else ("none", "")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise invalid(
            'tool_choice must be none, auto, required, or {"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    if name not in tools:
        raise invalid(f"tool_choice names {name[:80]!r}, which is none of the tools; send it in tools", "tool_choice")
    return "named", name


def message_calls(calls: Sequence[MessageToolCall], where: str, limits: RequestLimits) -> list[dict[str, Any]]:
    """Returns the calls of an earlier answer. Raises APIError 400 for too many, or arguments that are too long."""
    if len(calls) > limits.max_tool_calls:
        raise invalid(
            f"{where}.tool_calls has {len(calls)} calls; the limit is {limits.max_tool_calls}: send fewer",
            f"{where}.tool_calls",
        )
    result = []
    for i, call in enumerate(calls):
        name = f"{where}.tool_calls[{i}]"
        if call.type != "function":
            raise invalid(f'{name}.type is {call.type[:40]!r}; it must be "function"', f"{name}.type")
        arguments = call.function.arguments
        if isinstance(arguments, str) and len(arguments) > limits.max_argument_chars:
            raise invalid(
                f"{name}.function.arguments has {len(arguments)} characters; the limit is "
                f"{limits.max_argument_chars}: shorten it",
                f"{name}.function.arguments",
            )
        function = {"name": call.function.name, "arguments": arguments}
        result.append({"id": call.id, "type": "function", "function": function})
    return result


def reasoning_variables(effort: str | None) -> dict[str, Any]:
    """Returns the template's variables for `reasoning_effort`. Raises APIError 400 for an unknown one."""
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise invalid(
            f"reasoning_effort is {effort[:40]!r}; it must be one of {', '.join(_EFFORTS)}", "reasoning_effort"
        )
    if effort == "none":  # templates that can leave reasoning out read the first name or the second
        return {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}
    return {"reasoning_effort": effort}


def read_budget(fields: ChatFields, model: ServedModel) -> int | None:
    """Returns how many tokens of an answer may be reasoning; None: any number. Raises APIError 400."""
    name, given = "thinking_budget", fields.thinking_budget
    if given is None:
        name, given = "thinking_token_budget", fields.thinking_token_budget
    elif fields.thinking_token_budget not in (None, given):
        raise invalid("thinking_budget and thinking_token_budget differ; send one of them", name)
    if given is None or given == -1:
        return model.thinking_budget
    if given < 0:
        raise invalid(f"{name} is {digits(given)}; it must be 0 or more, or -1 for the server's own", name)
    if model.conversation.reasoning is None:
        raise invalid(
            f"{name} is not supported: this model has no known form of reasoning; leave it out, or start the server "
            "with --reasoning-format",
            name,
            "unsupported_parameter",
        )
    most = 2**31 - 1 if model.thinking_budget is None else model.thinking_budget
    if given > most:
        raise invalid(f"{name} is {digits(given)}; this server's limit is {most}: lower it", name)
    return given


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
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    arguments: list[list[str]] = []
    for part in parts:
        match part.kind:
            case "content":
                content.append(part.text)
            case "reasoning":
                reasoning.append(part.text)
            case "call":
                calls.append({"id": part.id, "type": "function", "function": {"name": part.text}})
                arguments.append([])
            case "arguments":
                arguments[-1].append(part.text)
    for call, fragments in zip(calls, arguments, strict=True):
        call["function"]["arguments"] = "".join(fragments)
    text = "".join(content)
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning:
        message |= dict.fromkeys(("reasoning_content", "reasoning"), "".join(reasoning))
    if calls:
        message["tool_calls"] = calls
    return message
