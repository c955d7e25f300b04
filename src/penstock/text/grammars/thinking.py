"""Ends a model's reasoning when its budget of tokens is spent, by the only tokens that may come next."""

from collections.abc import Callable, Sequence

from penstock.messages import Thinking

AllowedTokens = tuple[int, ...]  # the ids of the only tokens that may come next


class ThinkingMarkers:
    """The markers around reasoning, and the tokens that write the end marker."""

    def __init__(self, thinking: Thinking, encode: Callable[[str], list[int]], special_ids: frozenset[int]) -> None:
        self.begin = thinking.begin.encode()
        self.end = thinking.end.encode()
        self.special = not special_ids.isdisjoint(encode(thinking.begin))  # no other text has the marker's tokens
        self.most = max(len(self.begin), len(self.end)) - 1  # bytes that a marker may begin with
        after = _allowed_tokens([encode(text) for text in thinking.answers])
        # For each number of characters of the end marker that the text already has: these characters, and the tokens
        # that complete the marker, with those that must follow it.
        known_at_most = 1 if not special_ids.isdisjoint(encode(thinking.end)) else len(thinking.end)
        self._closings = [
            (thinking.end[:known].encode(), [*((i,) for i in encode(thinking.end[known:])), *after])
            for known in range(known_at_most)
        ]

    def closing(self, text: bytes) -> list[AllowedTokens]:
        """The tokens that end reasoning, one after the other. `text` is its end so far: it may have a part of the end
        marker."""
        return list(next(steps for known, steps in reversed(self._closings) if text.endswith(known)))


def _allowed_tokens(alternatives: Sequence[Sequence[int]]) -> list[AllowedTokens]:
    """Returns what each of the next tokens may be so that one of the texts results, up to the first place where they
    differ."""
    steps: list[AllowedTokens] = []
    for ids in zip(*alternatives, strict=False):
        steps.append(tuple(dict.fromkeys(ids)))
        if len(steps[-1]) > 1:
            break
    return steps


class Thinker:
    """Counts the tokens of reasoning in one output. The budget is that of all its parts together."""

    __slots__ = ("_closing", "_first", "_left", "_markers", "_strict", "_tail", "on")

    def __init__(self, markers: ThinkingMarkers, thinking: Thinking, *, strict: bool) -> None:
        """With `strict`, a grammar holds the output from its first token: reasoning can only come before the answer."""
        self._markers = markers
        self._left = thinking.budget
        self._closing: list[AllowedTokens] = []  # empty: any token may come next
        self._tail = b""
        self._strict = strict and not markers.special
        self._first = True  # nothing but blanks came outside of reasoning
        self.on = thinking.opened  # whether the next token is reasoning
        self._close_if_spent()

    def copy(self) -> "Thinker":
        other = object.__new__(Thinker)
        for name in Thinker.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    @property
    def end_marker(self) -> bytes:
        return self._markers.end

    @property
    def allowed(self) -> AllowedTokens | None:
        """The tokens that may come next because reasoning must end; None: any."""
        return self._closing[0] if self._closing else None

    def free(self, tokens: int) -> bool:
        """True if every token may come next, and also after any `tokens` more."""
        spare = self._left if self.on else self._left + 1  # the marker itself is a token
        return not self._closing and (not tokens or spare > tokens)

    def answer(self) -> None:
        """Notes that a grammar holds the rest of the output. Text in it that looks like a marker is not one, unless
        markers are special tokens."""
        self._strict, self._first = not self._markers.special, False

    def take(self, text: bytes) -> None:
        """Counts the next token of the output, whose text is `text`."""
        text, closing = self._tail + text, bool(self._closing)
        self._closing = self._closing[1:]
        if self.on:
            _, end, after = text.partition(self._markers.end)
            if end:
                self.on = False
                text = after
            elif not closing:
                self._left -= 1
        elif not closing:
            text = self._look_for_begin(text)
        self._tail = text[-self._markers.most :]
        self._close_if_spent()

    def _look_for_begin(self, text: bytes) -> bytes:
        """Returns the text that may yet belong to a marker."""
        begin = self._markers.begin
        if self._strict:
            text = text.lstrip() if self._first else b""
            self._first = self._first and (begin.startswith(text) or text.startswith(begin))
            if not self._first:
                return b""
        _, found, after = text.partition(begin)
        self.on = bool(found)
        return after if found else text

    def _close_if_spent(self) -> None:
        if self.on and self._left <= 0 and not self._closing:
            self._closing = self._markers.closing(self._tail)
