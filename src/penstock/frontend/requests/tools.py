"""Checks the tools of a chat and the earlier calls of its messages. Independent of the wire."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import orjson
from pydantic_core import from_json

from penstock.frontend.errors import invalid
from penstock.frontend.limits import RequestLimits
from penstock.frontend.requests.reply import ToolChoice, ToolUse
from penstock.frontend.served import ServedModel

# Names as Anthropic's API and MCP allow them; OpenAI's allows 64 characters.
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_LONG_NUMBER = re.compile(r"\d{19}")  # shorter integers have fewer than 64 bits
_CHOICES: Mapping[str, ToolChoice] = {"none": "none", "auto": "auto", "required": "required"}


def check_tools(
    tools: Sequence[dict[str, Any]] | None,
    limits: RequestLimits,
    *,
    within: str = "function.",
    schema: str = "parameters",
) -> dict[str, dict[str, Any]]:
    """Returns the tools by name. Raises APIError 400 that names the tool and what is wrong with it.

    `tools` have OpenAI's form: {"type": "function", "function": {...}}. `within` and `schema` are the names that the
    wire has for the place of the tool's fields, and for its schema.
    """
    if not tools:
        return {}
    if len(tools) > limits.max_tools:
        raise invalid(f"tools has {len(tools)} tools; the limit is {limits.max_tools}: send fewer", "tools")
    size = len(to_json(tools, "tools"))
    if size > limits.max_tool_bytes:
        raise invalid(f"tools has {size} bytes of JSON; the limit is {limits.max_tool_bytes}: send less", "tools")
    known: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        name = _check_tool(tool, f"tools[{i}]", within, schema)
        if name in known:
            raise invalid(f"tools[{i}].{within}name is {name!r}, as that of another tool; rename it", "tools")
        known[name] = {"type": "function", **tool}
    return known


def read_choice(choice: str | Mapping[str, Any] | None, within: str = "") -> tuple[ToolChoice, str]:
    """Returns the choice of tools as OpenAI's APIs have it, and the name of the tool if it is a named one. Raises
    APIError 400.

    `within` is the field of a named choice that has the name, if the choice itself does not have it.
    """
    if choice is None:
        return "auto", ""
    if isinstance(choice, str) and choice in _CHOICES:
        return _CHOICES[choice], ""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        holder = choice.get(within) if within else choice
        if isinstance(holder, dict) and isinstance(holder.get("name"), str):
            return "named", holder["name"]
    form = f'{{"type": "function", "{within}": {{"name": ...}}}}' if within else '{"type": "function", "name": ...}'
    shown = f"{choice[:40]!r}" if isinstance(choice, str) else "an object of another form"
    raise invalid(f"tool_choice is {shown}; it must be none, auto, required, or {form}", "tool_choice")


def use_tools(
    model: ServedModel,
    tools: Mapping[str, Mapping[str, Any]],
    choice: ToolChoice,
    name: str,
    *,
    parallel: bool,
) -> ToolUse:
    """Returns the tools that the answer may call. `name` is that of a named tool. Raises APIError 400 for no tools, or
    a name of none."""
    if choice in ("none", "auto") and not tools:
        choice = "none"
    if choice == "none":
        return ToolUse()
    if not tools:
        raise invalid("tool_choice requires a call, but there are no tools; send tools", "tool_choice")
    if choice == "named" and name not in tools:
        raise invalid(f"tool_choice names {name[:80]!r}, which is none of the tools; send it in tools", "tool_choice")
    if model.chat_format.tools is None:
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


def check_calls(count: int, where: str, limits: RequestLimits) -> None:
    """Raises APIError 400 if an earlier answer has more calls than one may have. `where` is their place in the body."""
    if count > limits.max_tool_calls:
        raise invalid(f"{where} has {count} calls; the limit is {limits.max_tool_calls}: send fewer", where)


def to_json(value: Any, where: str) -> bytes:
    """Returns what a request has at `where`, as JSON. Raises APIError 400 if it has an integer that JSON encoders have
    not: decoders take any."""
    try:
        return orjson.dumps(value)
    except TypeError:
        raise invalid(f"{where} has an integer of more than 64 bits; send a smaller one, or a string", where) from None


def check_arguments(arguments: str, where: str, limits: RequestLimits) -> str:
    """Returns the arguments of an earlier call, as JSON. Raises APIError 400 if they are too long."""
    if len(arguments) > limits.max_argument_chars:
        raise invalid(
            f"{where} has {len(arguments)} characters; the limit is {limits.max_argument_chars}: shorten it", where
        )
    return arguments


def parse_arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call as an object. If the answer's limit cut them, those that are complete."""
    try:
        arguments = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    if not isinstance(arguments, dict):
        return {}
    return cast(dict[str, Any], _bounded(arguments)) if _LONG_NUMBER.search(text) else arguments


def _bounded(value: Any) -> Any:
    """The value with floats for integers of more than 64 bits, which cannot be encoded, and None for infinite ones."""
    match value:
        case dict():
            return {key: _bounded(each) for key, each in value.items()}
        case list():
            return [_bounded(each) for each in value]
        case int() if not -(2**63) <= value < 2**64:
            return float(value) if abs(value) < 10**308 else None
    return value


def _check_tool(tool: Mapping[str, Any], where: str, within: str, schema: str) -> str:
    """Returns the tool's name. Raises APIError 400 for fields of another form."""
    if tool.get("type", "function") != "function":
        raise invalid(f'{where}.type is {str(tool["type"])[:40]!r}; it must be "function"', f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid(f"{where}.function is missing; send an object with a name", f"{where}.function")
    where = f"{where}.{within}"
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"{where}name is {str(name)[:80]!r}; it must have 1 to 128 letters, digits, '_', '-' or '.'", f"{where}name"
        )
    description, parameters = function.get("description"), function.get("parameters")
    if not isinstance(description, str | None):
        raise invalid(f"{where}description must be a string", f"{where}description")
    if not isinstance(parameters, dict | None):
        raise invalid(f"{where}{schema} must be an object: a JSON schema", f"{where}{schema}")
    kind = (parameters or {}).get("type", "object")
    if kind != "object":
        where = f"{where}{schema}.type"
        raise invalid(f'{where} is {str(kind)[:40]!r}; it must be "object"', where)
    return name
