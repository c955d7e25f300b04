"""Ends a model's reasoning when its budget of tokens is spent, by the only tokens that may come next."""

from collections.abc import Callable, Sequence

from penstock.messages import Thinking

Step = tuple[int, ...]  # the token ids that may come next


class Markers:
    """The texts around reasoning, and the tokens that end it."""

    def __init__(self, thinking: Thinking, encode: Callable[[str], list[int]], special_ids: frozenset[int]) -> None:
        self.begin = thinking.begin.encode()
        self.end = thinking.end.encode()
        self.special = not special_ids.isdisjoint(encode(thinking.begin))  # no other text has the marker's tokens
        self.most = max(len(self.begin), len(self.end)) - 1  # bytes that a marker may begin with
        after = _steps([encode(text) for text in thinking.answers])
        # By how many of its characters there are: the tokens that complete the end, and what must follow it.
        known_at_most = 1 if not special_ids.isdisjoint(encode(thinking.end)) else len(thinking.end)
        self._closings = [
            (thinking.end[:known].encode(), [*((i,) for i in encode(thinking.end[known:])), *after])
            for known in range(known_at_most)
        ]

    def closing(self, text: bytes) -> list[Step]:
        """The tokens that end reasoning with this text, of which the last characters may begin the marker."""
        return list(next(steps for known, steps in reversed(self._closings) if text.endswith(known)))


def _steps(alternatives: Sequence[Sequence[int]]) -> list[Step]:
    """The tokens of several texts, up to the first that tells them apart."""
    steps: list[Step] = []
    for ids in zip(*alternatives, strict=False):
        steps.append(tuple(dict.fromkeys(ids)))
        if len(steps[-1]) > 1:
            break
    return steps


class Thinker:
    """Counts the tokens of reasoning in one output. The budget is that of all its parts together."""

    __slots__ = ("_closing", "_first", "_left", "_markers", "_strict", "_tail", "on")

    def __init__(self, markers: Markers, thinking: Thinking, *, strict: bool) -> None:
        """With `strict`, a grammar holds the output from its first token: reasoning can only come before the answer."""
        self._markers = markers
        self._left = thinking.budget
        self._closing: list[Step] = []  # empty: any token may come next
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
    def allowed(self) -> Step | None:
        """The tokens that may come next because reasoning must end; None: any."""
        return self._closing[0] if self._closing else None

    def free(self, tokens: int) -> bool:
        """Whether any token may come next, and also after `tokens` more, whatever they are."""
        spare = self._left if self.on else self._left + 1  # the marker itself is a token
        return not self._closing and (not tokens or spare > tokens)

    def answer(self) -> None:
        """Note that from here on a grammar holds the output: an ordinary text that looks like the marker is none."""
        self._strict, self._first = not self._markers.special, False

    def take(self, text: bytes) -> None:
        """Go on by a token of the output."""
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
