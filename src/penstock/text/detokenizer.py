"""Turns token ids into text as they arrive."""

from codecs import utf_8_decode
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer


class Detokenizer:
    """Produces the text of one choice.

    The results of all pushes and of the flush together are the decoded prompt and output, less the prompt's text. Text
    is final once returned: only the bytes of an incomplete UTF-8 character are held back, three at most. Invalid UTF-8
    becomes U+FFFD, one for each maximal ill-formed part, as Unicode recommends. (`Tokenizer.decode` differs for
    byte-fallback tokens: one invalid byte makes it replace the whole run of them.)

    A character that begins in the prompt and ends in the output belongs to the output.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """`shown` are special tokens that are not skipped."""
        self._table = tokenizer.token_table(skip_special_tokens=skip_special_tokens, shown=shown)
        self._rest = b""  # of an incomplete character
        decoder = self._table.decoder
        self._strip_left = decoder.strip_count
        self._first = True
        self._at_start = decoder.start_differs or decoder.strip_count > 0
        for token_id in prompt_ids:
            if not self._at_start:
                break
            self._start(token_id)
        self._prompts_own = ""
        self._decode(self._end_of(prompt_ids))
        # The prompt's incomplete last character, as the prompt's own text shows it: as U+FFFD.
        self._prompts_own = self._rest.decode(errors="replace")

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes."""
        return self._decode(self._start(token_id) if self._at_start else self._table[token_id])

    def flush(self) -> str:
        """Ends the text. Returns U+FFFD if a character is incomplete, else nothing."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._rest + data
        text, used = utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        if self._prompts_own and text:
            # If the output does not complete the prompt's last character, its U+FFFD is the prompt's.
            text, self._prompts_own = text.removeprefix(self._prompts_own), ""
        return text

    def _start(self, token_id: int) -> bytes:
        """Returns a token's bytes at the start of a text, where a decoder may drop a space."""
        if not self._at_start:
            return self._table[token_id]
        token = self._table.visible(token_id)
        if token is None:
            return b""
        decoder = self._table.decoder
        piece = decoder.bytes_of(token, self._first)
        self._first = False
        while self._strip_left and piece.startswith(decoder.strip):
            piece = piece[1:]
            self._strip_left -= 1
        if piece:
            self._strip_left = 0
        self._at_start = self._strip_left > 0
        return piece

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """Returns at least the prompt's last three bytes: an incomplete character has no more."""
        end = b""
        for token_id in reversed(prompt_ids):
            end = self._table[token_id] + end
            if len(end) >= 3:
                break
        return end
