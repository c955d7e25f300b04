"""Divides the text of a chat's choices into content, reasoning and tool calls. Independent of the API dialect."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits
from penstock.frontend.served import ServedModel
from penstock.messages import FinishReason
from penstock.text.calls import CallLimits, MessageParser, Part, ToolOutputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a request, and what it wants of them."""

    tools: Sequence[Mapping[str, Any]] = ()  # as templates show them: {"type": "function", "function": {...}}
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the arguments, by the tool's name
    choice: Literal["auto", "required", "named", "none"] = "none"
    name: str = ""  # of the one tool, if the choice is named
    parallel: bool = True


class ReplyReader:
    """Reads the choices of one chat, whose tokens may be reasoning and tool calls."""

    def __init__(self, model: ServedModel, use: ToolUse, prompt_end: str, choices: int, limits: RequestLimits) -> None:
        conversation = model.conversation
        most = CallLimits(calls=limits.max_tool_calls, argument_chars=limits.max_argument_chars)
        self._use = use
        self._counts = conversation.reasoning is not None
        self._choices = [
            _Choice(
                MessageParser(
                    conversation.tools if use.schemas else None,
                    conversation.reasoning,
                    use.schemas,
                    parallel=use.parallel,
                    prompt_end=prompt_end,
                    limits=most,
                )
            )
            for _ in range(choices)
        ]

    def read(self, choice: int, text: str, offsets: Sequence[int], *, ended: bool) -> list[Part]:
        """Returns the parts that new text makes final. `offsets` are where its tokens begin in the choice's text.

        Raises APIError 500 if the model's tool calls exceed a limit.
        """
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
        """Returns the reason as clients expect it: tool_calls, but stop after a call to a named tool."""
        calls = self._choices[choice].called and reason == "stop" and self._use.choice != "named"
        return "tool_calls" if calls else reason

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of tokens that are reasoning, so far. None if the model has no known form of reasoning."""
        return sum(state.reasoning_tokens for state in self._choices) if self._counts else None


class _Choice:
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
