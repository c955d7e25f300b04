"""Turns Anthropic's messages, tools and thinking into those that chat templates take."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.frontend.anthropic.fields import ContentBlock, Message, OutputFormat, PromptFields
from penstock.frontend.errors import invalid
from penstock.frontend.http.body import refuse_unsupported
from penstock.frontend.limits import RequestLimits
from penstock.frontend.offload import give_way
from penstock.frontend.requests.chat import ChatMessages
from penstock.frontend.requests.grammar import GrammarSource
from penstock.frontend.requests.reasoning import check_budget, reasoning_variables, thinking_variables
from penstock.frontend.requests.reply import ToolChoice, ToolUse
from penstock.frontend.requests.tools import check_arguments, check_calls, check_tools, to_json, use_tools
from penstock.frontend.served import ServedModel

_CHOICES: Mapping[str, ToolChoice] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}
_THINKING = ("enabled", "adaptive", "disabled")


async def read_prompt(fields: PromptFields, limits: RequestLimits, use: ToolUse) -> ChatMessages:
    """The prompt of a request, not yet rendered. Raises APIError 400 that names the parameter."""
    refuse_unsupported(fields)
    messages: list[Mapping[str, Any]] = []
    if system := _text(fields.system or "", "system"):
        messages.append({"role": "system", "content": system})
    for i, message in enumerate(fields.messages):
        messages += _messages(message, f"messages[{i}]", limits)
        await give_way(i)
    continues = bool(fields.messages) and fields.messages[-1].role == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise invalid("messages ends with a tool_use; send a message with its tool_result after it", "messages")
    return ChatMessages(messages=messages, tools=use.tools, variables=_variables(fields), continues=continues)


def read_tools(fields: PromptFields, model: ServedModel, limits: RequestLimits) -> ToolUse:
    """The tools that the answer may call. Raises APIError 400 that names the parameter."""
    tools = []
    for i, tool in enumerate(fields.tools or ()):
        if tool.type not in (None, "custom"):
            name = f"tools[{i}].type"
            raise invalid(f'{name} is {tool.type[:40]!r}, a tool of Anthropic\'s; send one of type "custom"', name)
        if tool.input_schema is None:
            name = f"tools[{i}].input_schema"
            raise invalid(f"{name} is missing; send a JSON schema", name, "missing_parameter")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        tools.append({"type": "function", "function": function})
    known = check_tools(tools, limits, within="", schema="input_schema")
    wanted = fields.tool_choice
    if wanted is None:
        return use_tools(model, known, "auto", "", parallel=True)
    choice = _CHOICES.get(wanted.type)
    if choice is None or (choice == "named" and wanted.name is None):
        raise invalid("tool_choice must be of type auto, any, none, or tool with a name", "tool_choice")
    return use_tools(model, known, choice, wanted.name or "", parallel=not wanted.disable_parallel_tool_use)


def read_grammar(fields: PromptFields) -> GrammarSource | None:
    """The schema of the answer. Raises APIError 400 that names the parameter."""
    config = fields.output_config
    if config is not None and config.format is not None:
        return _schema(config.format, "output_config.format")
    return None if fields.output_format is None else _schema(fields.output_format, "output_format")


def shows_thinking(fields: PromptFields) -> bool:
    """True if the answer has thinking blocks. Without `thinking`, reasoning is left out, as clients expect none."""
    return fields.thinking is not None and fields.thinking.type != "disabled"


def thinking_budget(fields: PromptFields, model: ServedModel) -> int | None:
    """How many tokens of an answer may be reasoning; None: any number. Clients send a number to every model, so one
    above the server's limit is lowered. Raises APIError 400 for a negative one."""
    given = fields.thinking.budget_tokens if fields.thinking is not None else None
    if given is None or model.chat_format.reasoning is None:
        return model.thinking_budget
    if model.thinking_budget is not None:
        given = min(given, model.thinking_budget)
    return check_budget(given, "thinking.budget_tokens", model)


def _schema(format: OutputFormat, param: str) -> GrammarSource:
    if format.type != "json_schema" or not bytes(format.schema):
        raise invalid(f'{param} must have the type "json_schema" and a schema', param)
    return GrammarSource("json_schema", bytes(format.schema).decode(), f"{param}.schema")


def _variables(fields: PromptFields) -> Mapping[str, Any]:
    thinking = fields.thinking
    if thinking is not None and thinking.type not in _THINKING:
        raise invalid(f"thinking.type is {thinking.type[:40]!r}; it must be {', '.join(_THINKING)}", "thinking.type")
    if thinking is None or thinking.type == "disabled":
        return reasoning_variables("none")
    effort = None if fields.output_config is None else fields.output_config.effort
    return thinking_variables(effort, "output_config.effort")


def _messages(message: Message, where: str, limits: RequestLimits) -> list[Mapping[str, Any]]:
    blocks = [ContentBlock("text", message.content)] if isinstance(message.content, str) else message.content
    match message.role:
        case "user":
            return list(_of_user(blocks, f"{where}.content"))
        case "assistant":
            return [_of_assistant(blocks, f"{where}.content", limits)]
        case "system":
            return [{"role": "system", "content": _text(blocks, f"{where}.content")}]
    role = message.role[:40]
    raise invalid(f"{where}.role is {role!r}; it must be user, assistant or system", f"{where}.role")


def _of_user(blocks: Sequence[ContentBlock], where: str) -> Iterator[Mapping[str, Any]]:
    """The messages of a user's blocks: each result of a tool is one, and the texts between them are."""
    texts: list[ContentBlock] = []
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(block)
            _check_text(block, f"{where}[{i}]")
            continue
        if block.tool_use_id is None:
            name = f"{where}[{i}].tool_use_id"
            raise invalid(f"{name} is missing; send the id of the tool_use", name, "missing_parameter")
        if texts:
            yield {"role": "user", "content": _text(texts, where)}
            texts = []
        content = _text(block.content or "", f"{where}[{i}].content")
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if texts or not blocks:
        yield {"role": "user", "content": _text(texts, where)}


def _of_assistant(blocks: Sequence[ContentBlock], where: str, limits: RequestLimits) -> Mapping[str, Any]:
    texts: list[ContentBlock] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        match block.type:
            case "thinking":
                thinking.append(block.thinking or "")
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_call(block, f"{where}[{i}]", limits))
            case _:
                _check_text(block, f"{where}[{i}]")
                texts.append(block)
    check_calls(len(calls), where, limits)
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts, where)}
    if any(thinking):
        message["reasoning_content"] = "".join(thinking)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: ContentBlock, where: str, limits: RequestLimits) -> dict[str, Any]:
    if block.id is None or block.name is None:
        raise invalid(f"{where} must have an id and a name", where, "missing_parameter")
    arguments = check_arguments(to_json(block.input or {}, f"{where}.input").decode(), f"{where}.input", limits)
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _text(content: str | Sequence[ContentBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_check_text(block, f"{where}[{i}]") for i, block in enumerate(content))


def _check_text(block: ContentBlock, where: str) -> str:
    """The text of a block. Raises APIError 400 for another kind of block."""
    if block.type != "text" or block.text is None:
        raise invalid(
            f'{where} is of type {block.type[:40]!r}; this model reads {{"type": "text", "text": ...}}', where
        )
    return block.text
