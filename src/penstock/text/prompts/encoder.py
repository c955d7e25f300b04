"""Turns prompts into token ids, within the model's context length."""

from penstock.text.calls.chat_format import ChatFormat
from penstock.text.errors import TokenizerError
from penstock.text.prompts.questions import EncodeChat, Encoded, EncodeInfill, EncodePair, EncodeText, PromptQuestion
from penstock.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 256  # longer than any token of the usual vocabularies: a longer text cannot fit
_COUNTED_CHARS = 8  # characters for each token of the context: a longer text is counted before it is encoded
_PIECE = 1 << 16  # characters
_END_CHARS = 64  # longer than any marker


class PromptTooLong(TokenizerError):
    """The prompt cannot fit in the context. The message is the number of tokens that it has more than."""

    @property
    def tokens(self) -> int:
        return int(str(self))


class PromptEncoder:
    """Renders and encodes the prompts of one model. Threads can share it."""

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._chat_format = chat_format
        self._max_model_len = max_model_len

    def encode(self, question: PromptQuestion) -> Encoded:
        """Raises TokenizerError, of which PromptTooLong is one, and ChatTemplateError."""
        match question:
            case EncodeChat():
                pieces = self._chat_format.render_pieces(
                    question.messages,
                    tools=question.tools,
                    add_generation_prompt=question.add_generation_prompt,
                    continue_final_message=question.continue_final_message,
                    **question.variables,
                )
                self.check_length(sum(map(len, pieces)))
                prompt_ids = self._pieces(pieces, question.add_special_tokens, 0)
                return Encoded(prompt_ids, "".join(pieces[-_END_CHARS:])[-_END_CHARS:])
            case EncodeText(text, add_special_tokens, most):
                return Encoded(self._pieces([text], add_special_tokens, most))
            case EncodeInfill(before, after, add_special_tokens):
                ids = self._tokenizer.encode_infill(before, after, add_special_tokens=add_special_tokens)
                return Encoded(tuple(ids))
            case EncodePair(text, second, add_special_tokens):
                tokens = self._tokenizer.encode_text(text, second, add_special_tokens=add_special_tokens)
                content = tokens.content
                return Encoded(tokens.ids, second=tokens.second, content=(content.start, content.stop))

    def check_length(self, chars: int) -> None:
        """Raises PromptTooLong for a text that cannot fit, before it is tokenised."""
        if chars > CHARS_PER_TOKEN * self._max_model_len:
            raise PromptTooLong(self._max_model_len)

    def _pieces(self, pieces: list[str], add_special_tokens: bool, most: int) -> tuple[int, ...]:
        if sum(map(len, pieces)) > _COUNTED_CHARS * self._max_model_len:
            self._count("".join(pieces), max(most, 2 * self._max_model_len))
        return tuple(self._tokenizer.encode_pieces(pieces, add_special_tokens=add_special_tokens))

    def _count(self, text: str, most: int) -> None:
        """Refuses a text of far too many tokens before all of it is encoded: 4 MiB of digits take 8 s. A text that is
        cut into pieces has about as many tokens, so two contexts are left."""
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._tokenizer.encode(text[start : start + _PIECE], add_special_tokens=False))
            if count > most:
                raise PromptTooLong(most)
