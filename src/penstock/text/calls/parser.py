"""Divides a model's text into content, reasoning and tool calls, as it arrives."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from penstock.text.calls.bodies import read_body
from penstock.text.calls.cursor import Cursor, Markers, Reading
from penstock.text.calls.formats import ChannelFormat, ReasoningFormat, ToolFormat
from penstock.text.calls.parts import CallLimits, Part, PartWriter, Tools

_HEADER_CHARS = 1024


class MessageParser:
    """Reads one message. How its text is split into pushes does not change the parts, joined.

    Text is held back only while it may be a part of a marker or of a call's head, and blanks while a marker may follow
    them. A malformed call becomes content, unless a part of it has already been returned: then it ends there.
    """

    def __init__(
        self,
        tools: ToolFormat | ChannelFormat | None,
        reasoning: ReasoningFormat | ChannelFormat | None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        parallel: bool = True,
        prompt_end: str = "",
        limits: CallLimits = CallLimits(),
    ) -> None:
        """`schemas` are the tools by name; without them, nothing is a call. `prompt_end` is the end of the prompt,
        which may begin the reasoning."""
        style = tools.id_style if tools is not None else "call"
        self._cursor = Cursor()
        self._writer = PartWriter(Tools(schemas or {}, parallel), limits, style)
        self._consumed = 0
        self._reasoning_from: int | None = None  # where the current reasoning began
        self._reasoning_spans: list[tuple[int, int]] = []
        channels = next((item for item in (tools, reasoning) if isinstance(item, ChannelFormat)), None)
        if channels is not None:
            self._run = self._channels(channels, prompt_end, keep_reasoning=reasoning is None)
        else:
            self._run = self._message(
                tools if isinstance(tools, ToolFormat) and schemas else None,
                reasoning if isinstance(reasoning, ReasoningFormat) else None,
                prompt_end,
            )
        next(self._run, None)

    def push(self, text: str) -> list[Part]:
        """Returns the parts that this text makes final. Raises ToolOutputError if the calls exceed a limit."""
        self._consumed += len(text)
        self._cursor.add(text)
        next(self._run, None)
        return self._writer.take()

    def finish(self) -> list[Part]:
        """Returns the rest of the parts, at the end of the text."""
        self._cursor.ended = True
        next(self._run, None)
        self._end_reasoning()
        return self._writer.take()

    @property
    def reasoning_spans(self) -> list[tuple[int, int]]:
        """The ranges of characters of the text that are reasoning, with their markers, as known so far."""
        if self._reasoning_from is None:
            return self._reasoning_spans
        return [*self._reasoning_spans, (self._reasoning_from, self._position)]

    @property
    def _position(self) -> int:
        return self._consumed - self._cursor.rest

    def _begin_reasoning(self, marker: int) -> None:
        """`marker` is the number of characters of the marker, which has been consumed."""
        self._writer.marker()
        self._reasoning_from = self._position - marker

    def _end_reasoning(self) -> None:
        if self._reasoning_from is not None:
            self._reasoning_spans.append((self._reasoning_from, self._position))
            self._reasoning_from = None

    def _message(self, tools: ToolFormat | None, reasoning: ReasoningFormat | None, prompt_end: str) -> Reading[None]:
        """Reads a message of a model without channels."""
        yield  # until the first text is there
        if reasoning is not None and prompt_end.rstrip().endswith(reasoning.begin):
            self._begin_reasoning(0)
            yield from self._read_reasoning(reasoning)
        opening = () if reasoning is None else reasoning.markers
        markers = Markers((*opening, *(tools.triggers if tools is not None else ())))
        fresh = True  # nothing of the answer has been read
        while True:
            if fresh and tools is not None and tools.whole_answer:
                char = yield from self._peek_past_blanks()
                if char == ("[" if tools.listed else "{"):
                    yield from self._calls(tools, "")
                fresh = False
            marker = yield from self._copy("content", markers)
            if marker is None:
                self._writer.finish("content")
                return
            if reasoning is not None and marker in opening:
                if marker == reasoning.begin:
                    self._begin_reasoning(len(marker))
                    yield from self._read_reasoning(reasoning)
                self._writer.marker()
                fresh = True
            elif tools is not None:
                yield from self._calls(tools, marker)

    def _peek_past_blanks(self) -> Reading[str]:
        """Returns the next character that is no blank. The blanks become content."""
        taken: list[str] = []
        self._cursor.taken = taken
        char = yield from self._cursor.blanks()
        self._cursor.taken = None
        self._writer.text("content", "".join(taken))
        return char

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Reading[None]:
        """Reads up to the end of the reasoning."""
        if (yield from self._copy("reasoning", Markers((reasoning.end,)))) is None:
            self._writer.finish("reasoning")
        self._writer.marker()
        self._end_reasoning()

    def _copy(self, kind: Literal["content", "reasoning"], markers: Markers) -> Reading[str | None]:
        """Passes text on up to the first marker, and returns the marker. Returns None at the end of the text."""
        cursor, writer = self._cursor, self._writer
        while True:
            text, marker = cursor.up_to(markers)
            if text:
                writer.text(kind, text)
            if marker is not None:
                return marker
            if cursor.ended:
                return None
            yield

    def _calls(self, tools: ToolFormat, trigger: str) -> Reading[None]:
        """Reads calls from behind their trigger. Text that is no call becomes content."""
        cursor = self._cursor
        heads = [text.strip() for text in tools.head]
        heads = heads[heads.index(trigger) + 1 :] if trigger in heads else heads
        taken: list[str] = [trigger]
        cursor.taken = taken
        bracket = not tools.listed or (yield from cursor.after_blanks("["))
        while bracket:
            for head in heads:
                yield from cursor.after_blanks(head)
            cursor.taken = taken
            if not (yield from read_body(tools, cursor, self._writer)):
                break
            taken.clear()
            cursor.taken = None
            for tail in tools.tail:
                yield from cursor.after_blanks(tail.strip())
            self._writer.marker()
            if not (yield from self._next_call(tools, taken)):
                break
            heads = []
        cursor.taken = None
        if taken:
            self._writer.text("content", "".join(taken))

    def _next_call(self, tools: ToolFormat, taken: list[str]) -> Reading[bool]:
        """True if another call follows in the same group of calls. Consumes what is between them, or the group's end.

        `taken` gets the text that is content if the next call is malformed.
        """
        cursor = self._cursor
        cursor.taken = taken
        if tools.listed:
            if (yield from cursor.after_blanks(",")):
                return True
            yield from cursor.after_blanks("]")
        elif tools.begin and tools.head:
            if (yield from cursor.after_blanks(tools.head[0].strip())):
                for head in tools.head[1:]:
                    yield from cursor.after_blanks(head.strip())
                return True
        elif tools.whole_answer:
            if tools.separator.strip():
                yield from cursor.after_blanks(tools.separator.strip())
            return (yield from cursor.blanks()) == "{"
        if tools.end:
            yield from cursor.after_blanks(tools.end.strip())
        taken.clear()
        return False

    def _channels(self, format: ChannelFormat, prompt_end: str, *, keep_reasoning: bool) -> Reading[None]:
        """Reads a message of several channels."""
        yield
        starts = Markers((*format.starts, *format.ends))
        body = Markers((format.message,))
        in_header = first = prompt_end.rstrip().endswith(f"{format.starts[0]}assistant")
        while True:
            at = self._position
            if in_header:
                header = yield from self._header(body, starts if first else None)
                first = False
                if header is None:
                    return
                if (yield from self._channel_call(format, header)):
                    in_header = False
                    continue
                reasons = re.search(format.reasoning, header) is not None and not keep_reasoning
            else:
                reasons = False
            if reasons:
                self._reasoning_from = at
            marker = yield from self._copy("reasoning" if reasons else "content", starts)
            self._end_reasoning()
            if marker is None:
                self._writer.finish("reasoning" if reasons else "content")
                return
            self._writer.marker()
            in_header = marker in format.starts

    def _header(self, body: Markers, starts: Markers | None) -> Reading[str | None]:
        """Returns a header. Returns None at the end of the text; a header that never ends becomes content.

        With `starts`, a text that has none of these and no recipient is an answer without a header.
        """
        cursor = self._cursor
        text = yield from cursor.before(body, _HEADER_CHARS)
        if text is None:
            if not cursor.ended:
                self._writer.text("content", cursor.take(_HEADER_CHARS))
                return ""
            rest = cursor.take(cursor.rest)
            if starts is not None and not rest.lstrip().startswith("to="):
                self._writer.text("content", starts.pattern.split(rest)[0])
                self._writer.finish("content")
            return None
        cursor.up_to(body)
        self._writer.marker()
        return text

    def _channel_call(self, format: ChannelFormat, header: str) -> Reading[bool]:
        found = re.search(format.call, header)
        if found is None or not self._writer.schemas or (yield from self._cursor.blanks()) != "{":
            return False
        self._writer.call(found["name"], None)
        yield from self._cursor.json_container(self._writer.arguments)
        self._writer.marker()
        return True
