"""The parts of a model's message, and the errors of reading it."""

import secrets
from collections.abc import Mapping
from string import ascii_letters, digits
from typing import Any, Literal, NamedTuple


class Part(NamedTuple):
    """A piece of a message. Adjacent pieces of the same kind and call belong together."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str  # of a call: the tool's name; of arguments: a fragment of JSON
    call: int = -1  # number of the call, from 0
    id: str = ""  # of a call


class ToolOutputError(ValueError):
    """A model's calls exceed a limit."""


class CallLimits(NamedTuple):
    """Limits of the calls in one message."""

    calls: int = 128
    argument_chars: int = 1 << 20  # of one call
    header_chars: int = 4096  # of a call before its arguments; a longer one is no call


class Tools(NamedTuple):
    """The tools that a message may call."""

    schemas: Mapping[str, Mapping[str, Any]]  # by name: the JSON schema of the arguments
    parallel: bool = True  # False: calls after the first one are dropped


def new_id(style: str) -> str:
    """Returns a random id for a call, in the style of a format."""
    if style == "short":
        return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class PartWriter:
    """Collects the parts that text becomes: numbers calls, joins adjacent parts and drops blanks beside markers."""

    def __init__(self, tools: Tools, limits: CallLimits, id_style: str) -> None:
        self.schemas = tools.schemas
        self.limits = limits
        self._parallel = tools.parallel
        self._id_style = id_style
        self._parts: list[Part] = []
        self._blanks = ""  # held back: dropped if a marker follows, else part of the text
        self._gap = ""  # between the content before calls and the content after them
        self._has_content = False
        self._after_marker = False
        self._calls = 0
        self._argument_chars = 0

    def take(self) -> list[Part]:
        """Returns the parts since the last call of this method."""
        parts, self._parts = self._parts, []
        return parts

    def text(self, kind: Literal["content", "reasoning"], text: str) -> None:
        """Adds content or reasoning."""
        if self._after_marker:
            text = text.lstrip()
        if not text:
            return
        self._after_marker = False
        if kind == "content":
            text, self._gap = self._gap + text, ""
        text = self._blanks + text
        shown = text.rstrip()
        self._has_content = self._has_content or bool(shown and kind == "content")
        self._blanks = text[len(shown) :]
        self._add(Part(kind, shown))

    def marker(self) -> None:
        """Drops the blanks on both sides of a marker."""
        self._blanks = ""
        self._after_marker = True

    def finish(self, kind: Literal["content", "reasoning"]) -> None:
        """Ends the text. Blanks at its end are content; those at the end of unfinished reasoning are dropped."""
        if kind == "content":
            self._add(Part(kind, self._blanks))
        self._blanks = ""

    def call(self, name: str, written_id: str | None) -> None:
        """Begins a call."""
        if self._calls >= self.limits.calls:
            raise ToolOutputError(
                f"the answer has more than {self.limits.calls} tool calls, which is the limit; send "
                "parallel_tool_calls: false, or a lower max_tokens"
            )
        if self._has_content:
            self._gap = self._gap or self._blanks or "\n"
        self.marker()
        number, self._calls = self._calls, self._calls + 1
        self._argument_chars = 0
        if self._parallel or not number:
            self._parts.append(Part("call", name, number, written_id or new_id(self._id_style)))

    def arguments(self, fragment: str) -> None:
        """Adds to the arguments of the latest call."""
        self._argument_chars += len(fragment)
        if self._argument_chars > self.limits.argument_chars:
            raise ToolOutputError(
                f"the arguments of a tool call have more than {self.limits.argument_chars} characters, which is the "
                "limit; send a lower max_tokens"
            )
        if self._parallel or self._calls == 1:
            self._add(Part("arguments", fragment, self._calls - 1))

    def _add(self, part: Part) -> None:
        if not part.text:
            return
        last = self._parts[-1] if self._parts else None
        if last is not None and last.kind == part.kind != "call" and last.call == part.call:
            self._parts[-1] = Part(part.kind, last.text + part.text, part.call)
        else:
            self._parts.append(part)
