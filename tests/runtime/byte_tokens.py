"""A vocabulary for the tiny models, which have 300 tokens: every byte, some pairs of bytes, and two special tokens."""

from collections.abc import Sequence

from penstock.text.grammars.matchers import GrammarMatchers

VOCAB = 300
END, OTHER_END = 298, 299
PAIRS = ['{"', '":', '",', "ab", "cd", "12", "00", "e\n", "  ", '"}', "tr", "ue"]


class ByteTokens:
    """What grammars need of a Tokenizer."""

    vocab_size = VOCAB
    special_ids = frozenset((END, OTHER_END))
    tokens = [bytes([i]) for i in range(256)] + [pair.encode() for pair in PAIRS]

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if token_id < len(self.tokens) else b"<end>" if token_id >= END else b""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


def text_of(token_ids: Sequence[int]) -> str:
    """The text of an output, without the token that ends it."""
    tokens = ByteTokens()
    return b"".join(tokens.token_bytes(i) for i in token_ids if i < END).decode()


def grammars() -> GrammarMatchers:
    return GrammarMatchers(ByteTokens, VOCAB, [END, OTHER_END], threads=2)  # type: ignore[arg-type, return-value]
