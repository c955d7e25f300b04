"""The byte-level BPE tokenizer: newline and indentation are one token, identifiers keep their leading mark."""

import random
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]
VOCAB_SIZE = 8192

# In order: line ends with the indentation that follows; a word with one mark before it (".join", "(self", " if");
# up to three digits; marks; spaces.
_PIECES = (
    r"(?:\r?\n[ \t]*)+"
    r"|[^\r\n\p{L}\p{N}_]?[\p{L}_]+"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}_]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a lossless byte-level BPE of ``VOCAB_SIZE`` tokens; the special tokens are the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_document(tokenizer: Tokenizer, text: str, rng: random.Random, split_share: float = 0.04) -> list[int]:
    """Encode one document and end it with the end-of-text token.

    A share of the line ends is encoded apart from the indentation after it: a prompt may end in a newline, and the
    model must have seen what follows one there.
    """
    lines = text.splitlines(keepends=True)
    pieces: list[str] = []
    start = 0
    for i in range(1, len(lines)):
        if rng.random() < split_share:
            pieces.append("".join(lines[start:i]))
            start = i
    pieces.append("".join(lines[start:]))
    ids = [token for encoding in tokenizer.encode_batch(pieces) for token in encoding.ids]
    return [*ids, tokenizer.token_to_id(END_OF_TEXT)]


def load_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
