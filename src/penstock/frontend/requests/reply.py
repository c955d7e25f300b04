"""Divides the text of a chat's choices into content, reasoning and tool calls. Independent of the wire."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
import orjson
from msgspec.structs import replace

from penstock.frontend.errors import APIError, invalid
from penstock.frontend.limits import RequestLimits
from penstock.frontend.offload import offload_if_large
from penstock.frontend.requests.grammar import GrammarSource, check_grammar
from penstock.frontend.served import ServedModel
from penstock.messages import FinishReason, Grammar
from penstock.text import GrammarError
from penstock.text.calls import CallLimits, ChatFormat, MessageParser, Part, ToolOutputError
from penstock.text.calls.budget import AnswerKind, thinking_of
from penstock.text.calls.grammar import ToolGrammar, grammar_for, reasoning_end
from penstock.text.grammars.schema import read_schema

ANY_TEXT = Grammar("any", "")
ToolChoice = Literal["auto", "required", "named", "none"]


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request, and how its answer may use them."""

    tools: Sequence[Mapping[str, Any]] = ()  # as templates show them: {"type": "function", "function": {...}}
    schemas: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)  # of arguments, by the tool's name
    choice: ToolChoice = "none"
    name: str = ""  # of the one tool, if the choice is named
    parallel: bool = True


async def reply_grammar(
    model: ServedModel,
    use: ToolUse,
    source: GrammarSource | None,
    prompt_end: str,
    body_size: int,
    budget: int | None = None,
) -> Grammar | None:
    """Returns the grammar of a chat's output: of its tools' calls, and of its answer, which is `source`. With a
    `budget`, so many of its tokens may be reasoning.

    `body_size` is the size of the request's body in bytes. Raises APIError 400 if a tool's schema cannot be held
    although a call is required.
    """
    grammar = await _grammar(model, use, source, prompt_end, body_size)
    reasoning = model.chat_format.reasoning
    if budget is None or reasoning is None:
        return grammar
    tools = bool(use.schemas) and model.chat_format.tools is not None
    if grammar is not None and not grammar.trigger and not tools:
        return grammar  # the answer begins with the first token
    answer: AnswerKind = "text" if not tools else "either" if use.choice == "auto" else "call"
    return replace(grammar or ANY_TEXT, thinking=thinking_of(reasoning, prompt_end, budget, answer=answer))


async def _grammar(
    model: ServedModel, use: ToolUse, source: GrammarSource | None, prompt_end: str, body_size: int
) -> Grammar | None:
    chat_format = model.chat_format
    if not use.schemas or chat_format.tools is None:
        if source is None:
            return None
        return await check_grammar(model, source, reasoning_end(chat_format.reasoning, prompt_end))
    required = use.choice != "auto"
    if source is not None and not required and source.kind != "json_schema":
        raise invalid(f"{source.param} excludes tools, unless tool_choice is none; leave one of them out", source.param)
    answer = None if required else source
    # A byte of a schema takes about four times as long as a character to tokenise.
    made = await offload_if_large(partial(_tool_grammar, chat_format, use, answer, prompt_end), 4 * body_size)
    try:
        return await check_grammar(model, GrammarSource("tools", made.text, "tools"), made.trigger)
    except APIError as error:
        if error.code != "invalid_grammar":
            raise
        if not required and source is None:
            return None  # too large to be held: the calls are then what the model writes
        if "JSON schema" in error.message:  # the message is about a grammar that the client did not write
            await _check_each(model, use, answer)
        raise


async def _check_each(model: ServedModel, use: ToolUse, answer: GrammarSource | None) -> None:
    """Raises APIError 400 that names the first schema which cannot be held."""
    for i, schema in enumerate(use.schemas.values()):
        where = f"tools[{i}].function.parameters"
        await check_grammar(model, GrammarSource("json_schema", orjson.dumps(schema).decode(), where))
    if answer is not None:
        await check_grammar(model, answer)


def _tool_grammar(chat_format: ChatFormat, use: ToolUse, answer: GrammarSource | None, prompt_end: str) -> ToolGrammar:
    assert chat_format.tools is not None
    required = use.choice != "auto"
    names = [use.name] if use.choice == "named" else list(use.schemas)
    return grammar_for(
        chat_format.tools,
        chat_format.reasoning,
        {name: _held_schema(use, name, required) for name in names},
        required=required,
        parallel=use.parallel and use.choice != "named",
        special=chat_format.special,
        prompt_end=prompt_end,
        answer=None if answer is None else _read(answer.text, answer.param),
    )


def _held_schema(use: ToolUse, name: str, required: bool) -> Mapping[str, Any]:
    """Returns the schema of a tool's arguments as the engine can hold it.

    If it cannot, and no call is required, the arguments are any JSON object.
    """
    try:
        param = f"tools[{list(use.schemas).index(name)}].function.parameters"
        read: Mapping[str, Any] = orjson.loads(_read(orjson.dumps(use.schemas[name]).decode(), param))
    except APIError:
        if required:
            raise
        return {"type": "object"}
    return read


def _read(schema: str, param: str) -> str:
    try:
        return read_schema(schema)
    except GrammarError as error:
        raise invalid(f"{param}: {error}", param, "invalid_grammar") from None


class ReplyReader(Protocol):
    """Divides the choices of one chat into content, reasoning and tool calls."""

    def read(self, choice: int, text: str, offsets: Sequence[int], *, ended: bool) -> list[Part]:
        """Returns the parts that new text makes final. `offsets` are where its tokens begin in the choice's text.

        Raises APIError 500 if the model's tool calls exceed a limit.
        """

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        """Returns the reason as clients expect it: tool_calls, but stop after a call to a named tool."""

    def called(self, choice: int) -> bool:
        """True if the choice has a call so far."""

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of tokens that are reasoning, so far. None if the model has no known form of reasoning."""


class TextReplyReader:
    """The ReplyReader of a model here, whose text has reasoning and tool calls in its own form."""

    def __init__(self, model: ServedModel, use: ToolUse, prompt_end: str, choices: int, limits: RequestLimits) -> None:
        chat_format = model.chat_format
        most = CallLimits(calls=limits.max_tool_calls, argument_chars=limits.max_argument_chars)
        self._use = use
        self._counts = chat_format.reasoning is not None
        self._choices = [
            _ChoiceReader(
                MessageParser(
                    chat_format.tools if use.schemas else None,
                    chat_format.reasoning,
                    use.schemas,
                    parallel=use.parallel,
                    prompt_end=prompt_end,
                    limits=most,
                )
            )
            for _ in range(choices)
        ]

    def read(self, choice: int, text: str, offsets: Sequence[int], *, ended: bool) -> list[Part]:
        state = self._choices[choice]
        if self._counts:
            state.offsets.extend(offsets)
        try:
            parts = state.parser.push(text)
            if ended:
                parts += state.parser.finish()
        except ToolOutputError as error:
            raise APIError(500, str(error), code="tool_call_too_large") from error
        state.called = state.called or any(part.kind == "call" for part in parts)
        return parts

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        calls = self._choices[choice].called and reason == "stop" and self._use.choice != "named"
        return "tool_calls" if calls else reason

    def called(self, choice: int) -> bool:
        return self._choices[choice].called

    @property
    def reasoning_tokens(self) -> int | None:
        return sum(state.reasoning_tokens for state in self._choices) if self._counts else None


class ReadableOutput(Protocol):
    """New output of a choice, or all of it."""

    @property
    def choice(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def offsets(self) -> Sequence[int]: ...


def read_parts(reader: ReplyReader | None, output: ReadableOutput, *, ended: bool) -> list[Part]:
    """Returns the parts of output. Without a reader, all text is content."""
    if reader is not None:
        return reader.read(output.choice, output.text, output.offsets, ended=ended)
    return [Part("content", output.text)] if output.text else []


@dataclass(slots=True)
class ReplyBlock:
    """Adjacent content or reasoning, or a call."""

    kind: Literal["content", "reasoning", "call"]
    text: str  # of a call: its arguments
    name: str = ""
    id: str = ""


def join_parts(parts: Iterable[Part]) -> list[ReplyBlock]:
    """Returns the blocks of a whole message."""
    blocks: list[ReplyBlock] = []
    for part in parts:
        if part.kind == "call":
            blocks.append(ReplyBlock("call", "", part.text, part.id))
        elif part.kind == "arguments" or (blocks and blocks[-1].kind == part.kind):
            blocks[-1].text += part.text
        else:
            blocks.append(ReplyBlock(part.kind, part.text))
    return blocks


class _ChoiceReader:
    __slots__ = ("called", "offsets", "parser")

    def __init__(self, parser: MessageParser) -> None:
        self.parser = parser
        self.called = False
        self.offsets = array("q")

    @property
    def reasoning_tokens(self) -> int:
        offsets = self.offsets
        return sum(
            bisect_left(offsets, end) - bisect_left(offsets, begin) for begin, end in self.parser.reasoning_spans
        )
