"""Token ids to text, while they come."""

import codecs
from collections.abc import Sequence

from penstock.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one choice, after its prompt.

    All pushes and the flush together give what the prompt's and the output's tokens decode to, less the prompt's text,
    whatever the chunks. Text is final once given: only the bytes of an unfinished UTF-8 character wait, three at most.
    Bytes that are no UTF-8 become U+FFFD, one for each maximal ill-formed part, as Unicode recommends.
    (`Tokenizer.decode` differs for byte-fallback tokens: one ill-formed byte makes it replace the whole run of them.)

    A character that begins in the prompt and ends in the output is the output's; the prompt's own text never appears.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens=skip_special_tokens)
        self._utf8 = _utf8("replace")
        decoder = self._pieces.decoder
        self._strip_left = decoder.strip_count
        self._first = True
        self._at_start = decoder.first_differs or decoder.strip_count > 0
        for token_id in prompt_ids:
            if not self._at_start:
                break
            self._start(token_id)
        self._utf8.decode(self._end_of(prompt_ids))
        # Bytes of the prompt that wait for more, as the prompt's own text shows them: as U+FFFD.
        self._prompts_own = self._utf8.getstate()[0].decode(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make final."""
        if self._at_start:
            return "".join([self._decode(self._start(token_id)) for token_id in token_ids])
        pieces = self._pieces
        return self._decode(b"".join([pieces[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """What is left when no more tokens come: U+FFFD for an unfinished character."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._utf8.decode(data, final)
        if self._prompts_own and text:
            # They are in this text: as a whole character with bytes of ours, or ill-formed still, and then not ours.
            text, self._prompts_own = text.removeprefix(self._prompts_own), ""
        return text

    def _start(self, token_id: int) -> bytes:
        """A token's bytes while the text has not begun, where a decoder may drop a space or leave one out."""
        if not self._at_start:
            return self._pieces[token_id]
        token = self._pieces.visible(token_id)
        if token is None:
            return b""
        decoder = self._pieces.decoder
        piece = decoder.spell(token, self._first)
        self._first = False
        while self._strip_left and piece.startswith(decoder.strip):
            piece = piece[1:]
            self._strip_left -= 1
        if piece:
            self._strip_left = 0
        self._at_start = self._strip_left > 0
        return piece

    def _end_of(self, prompt_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, three or more: an unfinished character has no more than that."""
        end = b""
        for token_id in reversed(prompt_ids):
            end = self._pieces[token_id] + end
            if len(end) >= 3:
                break
        return end
