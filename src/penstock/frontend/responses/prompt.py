"""Turns the items, tools and formats of a response's request into those that chat templates take."""

import re
from collections.abc import Sequence
from typing import Any

from penstock.frontend.errors import invalid
from penstock.frontend.limits import RequestLimits
from penstock.frontend.offload import give_way
from penstock.frontend.requests.chat import ChatMessages
from penstock.frontend.requests.grammar import ANY_OBJECT, GrammarSource
from penstock.frontend.requests.reasoning import reasoning_variables
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.requests.tools import check_arguments, check_calls, check_tools, read_choice, use_tools
from penstock.frontend.responses.fields import ContentPart, Item, PromptFields
from penstock.frontend.served import ServedModel

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_SHOWN = 8  # tools in a header
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


async def read_prompt(
    fields: PromptFields, earlier: Sequence[Item], items: Sequence[Item], limits: RequestLimits, use: ToolUse
) -> ChatMessages:
    """The prompt of a request, not yet rendered. `earlier` are the items of the responses that it continues, `items`
    its own. Raises APIError 400 that names the item."""
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    for where, group in (("previous_response_id", earlier), ("input", items)):
        for i, item in enumerate(group):
            _add(messages, item, f"{where}[{i}]", limits)
            await give_way(i)
    for message in messages:
        if "tool_calls" in message:
            check_calls(len(message["tool_calls"]), "input", limits)
    effort = None if fields.reasoning is None else fields.reasoning.effort
    variables = reasoning_variables(effort, "reasoning.effort")
    return ChatMessages(messages=messages, tools=use.tools, variables=variables, param="input")


def function_tools(fields: PromptFields) -> list[dict[str, Any]]:
    """The tools of a request that this server has: those that the client runs."""
    return [tool for tool in fields.tools or () if tool.get("type") == "function"]


def ignored_tools(fields: PromptFields) -> str:
    """The types and names of the other tools, "custom apply_patch, web_search"; "" if there are none. Agents send them
    with every request, whatever the server has."""
    others = [tool for tool in fields.tools or () if tool.get("type") != "function"]
    shown = [" ".join(_plain(tool[key]) for key in ("type", "name") if key in tool) for tool in others[:_SHOWN]]
    return ", ".join(shown + [f"and {len(others) - _SHOWN} more"] * (len(others) > _SHOWN))


def _plain(value: Any) -> str:
    """A client's text as a header can have it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", str(value)[:64])


def read_tools(fields: PromptFields, model: ServedModel, limits: RequestLimits) -> ToolUse:
    """The tools that the answer may call. Raises APIError 400 that names the parameter."""
    tools = []
    for tool in function_tools(fields):
        function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    known = check_tools(tools, limits, within="")
    choice, name = read_choice(fields.tool_choice)
    return use_tools(model, known, choice, name, parallel=fields.parallel_tool_calls is not False)


def read_grammar(fields: PromptFields) -> GrammarSource | None:
    """The grammar of the answer, not yet checked. Raises APIError 400 that names the parameter."""
    if fields.text is None:
        return None
    if fields.text.verbosity not in (None, "medium"):
        name = "text.verbosity"
        raise invalid(f"{name} is not supported by this server; leave it out", name, "unsupported_parameter")
    wanted = fields.text.format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSource("json_schema", ANY_OBJECT, "text.format")
    if wanted.type != "json_schema":
        kind = wanted.type[:40]
        raise invalid(f"text.format.type is {kind!r}; it must be text, json_object or json_schema", "text.format.type")
    if not bytes(wanted.schema):
        name = "text.format.schema"
        raise invalid(f"{name} is missing; send a JSON schema", name, "missing_parameter")
    return GrammarSource("json_schema", bytes(wanted.schema).decode(), "text.format.schema")


def _add(messages: list[dict[str, Any]], item: Item, where: str, limits: RequestLimits) -> None:
    """Adds an item. Reasoning, text and calls that follow each other are one message of the assistant."""
    match item.type or ("message" if item.role is not None else ""):
        case "message":
            role = _ROLES.get(item.role or "")
            if role is None:
                shown = (item.role or "")[:40]
                raise invalid(f"{where}.role is {shown!r}; it must be one of {', '.join(_ROLES)}", f"{where}.role")
            text = _text(item.content, f"{where}.content")
            if role != "assistant":
                messages.append({"role": role, "content": text})
                return
            message = _assistant(messages, after_text=False)
            message["content"] = text
        case "reasoning":
            text = _text(item.content or item.summary or "", f"{where}.content")
            message = _assistant(messages, after_text=False)
            if text:
                message["reasoning_content"] = message.get("reasoning_content", "") + text
        case "function_call":
            if item.call_id is None or item.name is None:
                raise invalid(f"{where} must have a call_id and a name", where, "missing_parameter")
            arguments = check_arguments(item.arguments or "{}", f"{where}.arguments", limits)
            function = {"name": item.name, "arguments": arguments}
            calls = _assistant(messages, after_text=True).setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        case "function_call_output":
            if item.call_id is None or item.output is None:
                raise invalid(f"{where} must have a call_id and an output", where, "missing_parameter")
            text = _text(item.output, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        case kind:
            name = f"{where}.type"
            message_text = f"{name} is {kind[:40]!r}; this server takes {', '.join(_ITEMS)}"
            raise invalid(message_text, name, "unsupported_parameter")


def _assistant(messages: list[dict[str, Any]], *, after_text: bool) -> dict[str, Any]:
    """The message of the assistant that an item is a part of: the last one, or a new one. Reasoning and text begin a
    new one if the last one has text or calls already; with `after_text`, the item may follow text."""
    last = messages[-1] if messages else {}
    open_ = last.get("role") == "assistant" and (after_text or not (last["content"] or "tool_calls" in last))
    if not open_:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _text(content: str | Sequence[ContentPart] | None, where: str) -> str:
    if content is None:
        raise invalid(f"{where} is missing; send a text", where, "missing_parameter")
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text if part.type in _TEXTS else None
        if text is None:
            name = f"{where}[{i}]"
            shown = part.type[:40]
            raise invalid(f'{name} is of type {shown!r}; this model reads {{"type": "input_text", "text": ...}}', name)
        texts.append(text)
    return "\n".join(texts)
