"""The chat format of a model: its formats of tool calls and reasoning, and prompts with tools."""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.text.calls.arguments import read_object
from penstock.text.calls.formats import (
    PLAIN_JSON,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ChannelFormat,
    PythonCall,
    ReasoningFormat,
    ToolFormat,
    find_reasoning_format,
    find_tool_format,
)
from penstock.text.calls.markers import MarkerTexts, new_mark
from penstock.text.calls.roles import RoleRules, arranged, find_rules
from penstock.text.calls.writing import WrittenCall, write_calls
from penstock.text.errors import ChatTemplateError
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_PROBE = "needle"
_REPR = re.compile(rf"'{_PROBE}|\\\\+\"{_PROBE}")  # an object as Python shows it, or a text encoded twice
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "x",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}, "required": []},
    },
}
_INSTRUCTION = """\
You can call these tools:
{tools}

To call a tool, answer with nothing but the call, in this form:
{example}
Its arguments must obey the tool's schema. To call no tool, answer in plain text."""

_NO_TOOLS = "\n\nAnswer with this in plain text."  # else small models repeat the call


class _CallForm(NamedTuple):
    """The form in which a template takes tool calls of earlier messages."""

    arguments_as_text: bool
    empty_content: str | None  # of a message with calls and no content; None: the key is left out


class ChatFormat:
    """The formats of one model, and its prompts. Threads can share it."""

    tools: ToolFormat | ChannelFormat | None  # None: calls are not supported
    reasoning: ReasoningFormat | ChannelFormat | None
    special: Mapping[str, int]  # the markers that are special tokens, or parts of some, with their ids

    def __init__(self, tokenizer: Tokenizer, tool_format: str = AUTO, reasoning_format: str = AUTO) -> None:
        """Raises ValueError for an unknown format."""
        self._template = tokenizer.chat_template
        source = "" if self._template is None else self._template.source
        self.tools = _chosen("--tool-format", tool_format, TOOL_FORMATS, lambda: find_tool_format(source))
        self.reasoning = _chosen(
            "--reasoning-format", reasoning_format, REASONING_FORMATS, lambda: find_reasoning_format(source)
        )
        texts = {tokenizer.token(token_id): token_id for token_id in tokenizer.special_ids}
        of_reasoning = _within(texts, self.reasoning)
        self.special = of_reasoning | _within(texts, self.tools)
        kept = of_reasoning if isinstance(self.reasoning, ReasoningFormat) else {}
        self._markers = MarkerTexts(tokenizer.special_texts)
        self._markers_of_assistant = (
            MarkerTexts(tokenizer.special_texts.keys() - kept.keys()) if kept else self._markers
        )
        self._shown = frozenset(of_reasoning.values()), frozenset(self.special.values())

    def shown(self, *, tools: bool) -> frozenset[int]:
        """Returns the special tokens that must be in a text so that it can be read, with tools or without."""
        return self._shown[tools]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """Returns the prompt of messages in OpenAI's form. Options are those of `ChatTemplate.render`.

        Raises ChatTemplateError if the template refuses the messages.
        """
        template = self._checked_template
        if any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            messages = self._with_results(messages)
            if (form := self._call_form) is not None:
                messages = [_shaped(message, form) for message in messages]
            else:
                messages = list(_flat(messages, self._format, "" if tools else _NO_TOOLS))
        if tools and not self._shows_tools:
            messages = _instructed(messages, tools, self._format)
            tools = None
        if tools and isinstance(self.tools, ChannelFormat):
            tools = [_described(tool) for tool in tools]
        messages = arranged(messages, self._rules_with_tools if tools else self._rules)
        return template.render(messages, tools=tools, **options)

    def render_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[str]:
        """Returns the prompt, as `render` does, in the pieces that `Tokenizer.encode_pieces` takes.

        Only the template writes special tokens. A text in a message that spells one is cut after its first character,
        so that it stays text. The assistant's messages may have the markers of reasoning, which templates look for.
        """
        mark = new_mark()
        try:
            shown = [
                (self._markers_of_assistant if message["role"] == "assistant" else self._markers).broken(message, mark)
                for message in messages
            ]
            tools, options = self._markers.broken(tools, mark), self._markers.broken(options, mark)
        except RecursionError as error:
            raise ChatTemplateError("the messages are nested too deeply; flatten them") from error
        return self.render(shown, tools=tools, **options).split(mark)

    @functools.cached_property
    def _rules(self) -> RoleRules:
        return self._find_rules(None)

    @functools.cached_property
    def _rules_with_tools(self) -> RoleRules:
        """The rules of requests with tools, for which a model may have another template."""
        return self._find_rules([_PROBE_TOOL])

    def _find_rules(self, tools: Sequence[Mapping[str, Any]] | None) -> RoleRules:
        form = self._call_form
        call = [] if form is None else [_shaped(message, form) for message in _probe()]
        return find_rules(functools.partial(self._checked_template.render, tools=tools), call)

    @property
    def _checked_template(self) -> ChatTemplate:
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        return self._template

    @property
    def _format(self) -> ToolFormat | ChannelFormat:
        return self.tools or PLAIN_JSON

    @property
    def _shows_tools(self) -> bool:
        """True if the template shows tools in the model's own format."""
        return self._checked_template.takes_tools and self.tools is not PLAIN_JSON

    @functools.cached_property
    def _call_form(self) -> _CallForm | None:
        """The form in which the template shows earlier calls, found by rendering one. None: it shows none."""
        if self._format is PLAIN_JSON:
            return None
        for as_text in (False, True):
            for empty in (None, ""):
                form = _CallForm(as_text, empty)
                try:
                    shown = self._checked_template.render(
                        [_shaped(message, form) for message in _probe()],
                        tools=[_PROBE_TOOL] if self._shows_tools else None,
                    )
                except ChatTemplateError:
                    continue
                python = isinstance(getattr(self._format, "body", None), PythonCall)
                if _PROBE in shown and "None" not in shown and (python or not _REPR.search(shown)):
                    return form
        return None

    def _with_results(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Gives results the names of their tools, and calls ids of the form that the model was trained with."""
        style = self._format.id_style
        names: dict[str, str] = {}
        ids: dict[str, str] = {}
        result = []
        for message in messages:
            message = dict(message)
            if calls := message.get("tool_calls"):
                message["tool_calls"] = calls = [dict(call) for call in calls]
                for call in calls:
                    given, name = call["id"], call["function"]["name"]
                    ids[given] = call["id"] = _id_in_style(style, given, name, len(ids))
                    names[given] = name
            elif message["role"] == "tool":
                given = message["tool_call_id"]
                message["tool_call_id"] = ids.get(given) or _id_in_style(style, given, "tool", len(ids))
                if given in names:
                    message.setdefault("name", names[given])
            result.append(message)
        return result


def _chosen(flag: str, name: str, formats: Mapping[str, Any], find: Any) -> Any:
    if name == AUTO:
        return find()
    if name == NONE:
        return None
    if name not in formats:
        raise ValueError(f"{flag} is {name!r}; it must be {AUTO}, {NONE}, or one of {', '.join(formats)}")
    return formats[name]


def _within(texts: Mapping[str, int], format: ToolFormat | ChannelFormat | ReasoningFormat | None) -> dict[str, int]:
    """Returns the texts that are markers of the format, or parts of some."""
    markers = () if format is None else format.markers
    return {text: value for text, value in texts.items() if text and any(text in marker for marker in markers)}


def _id_in_style(style: str, given: str, name: str, number: int) -> str:
    if style == "short" and not _SHORT_ID.fullmatch(given):
        return hashlib.sha256(given.encode("utf-8", "surrogatepass")).hexdigest()[:9]
    if style == "written" and not given.startswith("functions."):
        return f"functions.{name}:{number}"
    return given


def _shaped(message: Mapping[str, Any], form: _CallForm) -> dict[str, Any]:
    """Returns a message with calls in the form that the template takes."""
    message = dict(message)
    if not message.get("tool_calls"):
        return message
    if not message.get("content"):
        message["content"] = form.empty_content
    if not form.arguments_as_text:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return message


def _parsed(arguments: Any) -> Mapping[str, Any]:
    """Returns the arguments of a call as an object, which templates iterate over.

    Arguments that a model wrote wrongly, or not to their end, are read as far as they can be: else every later request
    of the conversation would fail.
    """
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    return arguments if isinstance(arguments, Mapping) else {}


def _probe() -> list[dict[str, Any]]:
    call = {
        "id": "abcdefgh0",
        "type": "function",
        "function": {"name": "probe", "arguments": json.dumps({_PROBE: _PROBE})},
    }
    return [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefgh0", "name": "probe", "content": "b"},
    ]


def _flat(
    messages: Iterable[Mapping[str, Any]], format: ToolFormat | ChannelFormat, remark: str
) -> Iterable[dict[str, Any]]:
    """Yields the messages with calls and results as text. Adjacent results become one message of the user, with the
    remark if it is the last message."""
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            results.append(f"Result of {message.get('name') or message['tool_call_id']}:\n{message['content'] or ''}")
            continue
        if results:
            yield {"role": "user", "content": "\n\n".join(results)}
            results = []
        if calls := message.get("tool_calls"):
            functions = [(call["function"]["name"], _parsed(call["function"]["arguments"])) for call in calls]
            text = write_calls(format, [WrittenCall(name, arguments) for name, arguments in functions])
            content = message.get("content")
            message = {key: value for key, value in message.items() if key != "tool_calls"}
            message["content"] = f"{content}\n{text}" if content else text
        yield dict(message)
    if results:
        yield {"role": "user", "content": "\n\n".join(results) + remark}


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with a description: gpt-oss' template refuses those without, which OpenAI's API allows."""
    function = tool.get("function")
    return {**tool, "function": {"description": "", **function}} if isinstance(function, Mapping) else tool


def _instructed(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], format: ToolFormat | ChannelFormat
) -> list[Mapping[str, Any]]:
    """Returns the messages with the tools in the system message."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write_calls(format, [WrittenCall("TOOL_NAME", {"ARGUMENT": "VALUE"})])
    text = _INSTRUCTION.format(tools=lines, example=example)
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
