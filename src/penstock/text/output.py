"""Produces the text of one choice up to a stop string."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.text.detokenizer import Detokenizer
from penstock.text.stops import StopStrings
from penstock.text.tokenizer import Tokenizer


class TextChunk(NamedTuple):
    """Holds text to send. How a choice's tokens are split into pushes does not change the text of all its chunks."""

    text: str
    stopped: str | None  # the stop string that ended the choice
    keep: int  # output tokens so far; if `stopped` is set, the choice ends here and later tokens do not count
    offsets: tuple[int, ...]  # for each counted token of this push: where its text begins in the choice's text


class OutputText:
    """Turns one choice's output tokens into text and finds stop strings, also across tokens and pushes.

    Text that may begin a stop string is held back until it is clear that it does not. The prompt is not searched. A
    stop string may contain a special token that is skipped: its text is searched, but not part of the output.
    Do not push a token that ends the choice by its id: it is not part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
        min_tokens: int = 0,
    ) -> None:
        """With `include_stop` the text includes the stop string. `shown` are special tokens that are not skipped.

        A stop string that is complete before `min_tokens` tokens is ordinary text. Raises ValueError for an empty
        stop string.
        """
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens, shown=shown)
        self._stops = StopStrings(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        hidden = tokenizer.special_texts if stop and skip_special_tokens else {}
        self._searched = {  # skipped tokens, and their texts, that a stop string contains
            token_id: text
            for text, token_id in hidden.items()
            if token_id not in shown and any(text in string for string in stop)
        }
        self._state = 0  # state of the stop strings' automaton
        self._held: list[_Piece] = []  # text held back because it may begin a stop string
        self._length = 0  # characters of output so far, including those held back
        self._tokens = 0
        self._stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextChunk:
        """Returns the text that these tokens make final. Tokens after a stop string are ignored."""
        texts: list[str] = []  # without stop strings
        pieces: list[_Piece] = []  # with stop strings
        offsets: list[int] = []
        for token_id in token_ids:
            if self._stopped is not None:
                break
            self._tokens += 1
            offsets.append(self._length)
            text = self._detokenizer.push(token_id)
            self._length += len(text)
            if self._stops is None:
                texts.append(text)
                continue
            pieces.append(_Piece(self._until_stop(self._stops, text), shown=True))
            if token_id in self._searched:
                pieces.append(_Piece(self._until_stop(self._stops, self._searched[token_id]), shown=False))
        if self._stops is None:
            return TextChunk("".join(texts), None, self._tokens, tuple(offsets))
        return self._chunk(self._stops, pieces, tuple(offsets))

    def finish(self) -> TextChunk:
        """Returns the rest of the text of a choice that ended without a stop string."""
        if self._stops is None:
            return TextChunk(self._detokenizer.flush(), None, self._tokens, ())
        pieces: list[_Piece] = []
        if self._stopped is None:
            pieces.append(_Piece(self._until_stop(self._stops, self._detokenizer.flush()), shown=True))
        self._state = 0  # no text follows, so none is held back
        return self._chunk(self._stops, pieces, ())

    def _until_stop(self, stops: StopStrings, text: str) -> str:
        """Returns the text up to the end of the first stop string that counts, or all of it if there is none."""
        start = 0
        while start < len(text):
            self._state, start, found = stops.scan(self._state, text, start)
            if found is not None and self._tokens >= self._min_tokens:
                self._stopped = found
                return text[:start]
        return text

    def _chunk(self, stops: StopStrings, pieces: list["_Piece"], offsets: tuple[int, ...]) -> TextChunk:
        if self._stopped is not None and not pieces:  # the stop string was in an earlier push
            return TextChunk("", self._stopped, self._tokens, offsets)
        pieces = [*self._held, *pieces]
        size = sum(len(piece.text) for piece in pieces)
        hold = stops.hold(self._state) if self._stopped is None else len(self._stopped)
        text, self._held = _divided(pieces, size - hold)
        if self._stopped is not None:
            self._held = []
            text += self._stopped if self._include_stop else ""
        return TextChunk(text, self._stopped, self._tokens, offsets)


class _Piece(NamedTuple):
    text: str
    shown: bool  # False: it is searched for stop strings, and not part of the output


def _divided(pieces: Sequence[_Piece], count: int) -> tuple[str, list[_Piece]]:
    """Returns the output in the first `count` characters, and the pieces after them."""
    shown: list[str] = []
    for i, (text, is_shown) in enumerate(pieces):
        if len(text) > count:
            if is_shown:
                shown.append(text[:count])
            return "".join(shown), [_Piece(text[count:], is_shown), *pieces[i + 1 :]]
        count -= len(text)
        if is_shown:
            shown.append(text)
    return "".join(shown), []
