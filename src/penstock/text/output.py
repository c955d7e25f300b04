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

    Text that may begin a stop string is held back until it is clear that it does not. The prompt is not searched.
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
        self._state = 0  # state of the stop strings' automaton
        self._held = ""  # text held back because it may begin a stop string
        self._length = 0  # characters of text so far, including those held back
        self._tokens = 0
        self._stopped: str | None = None

    def push(self, token_ids: Sequence[int]) -> TextChunk:
        """Returns the text that these tokens make final. Tokens after a stop string are ignored."""
        texts: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            if self._stopped is not None:
                break
            self._tokens += 1
            offsets.append(self._length)
            text = self._detokenizer.push(token_id)
            self._length += len(text)
            texts.append(text if self._stops is None else self._until_stop(self._stops, text))
        return self._chunk("".join(texts), tuple(offsets))

    def finish(self) -> TextChunk:
        """Returns the rest of the text of a choice that ended without a stop string."""
        text = "" if self._stopped is not None else self._detokenizer.flush()
        if self._stops is not None:
            text = self._until_stop(self._stops, text)
        self._state = 0  # no text follows, so none is held back
        return self._chunk(text, ())

    def _until_stop(self, stops: StopStrings, text: str) -> str:
        """Returns the text up to the end of the first stop string that counts, or all of it if there is none."""
        start = 0
        while start < len(text):
            self._state, start, found = stops.scan(self._state, text, start)
            if found is not None and self._tokens >= self._min_tokens:
                self._stopped = found
                return text[:start]
        return text

    def _chunk(self, text: str, offsets: tuple[int, ...]) -> TextChunk:
        if self._stops is None:
            return TextChunk(text, None, self._tokens, offsets)
        text = self._held + text
        if self._stopped is not None:
            self._held = ""
            return TextChunk(
                text if self._include_stop else text.removesuffix(self._stopped), self._stopped, self._tokens, offsets
            )
        border = len(text) - self._stops.hold(self._state)
        self._held = text[border:]
        return TextChunk(text[:border], None, self._tokens, offsets)
