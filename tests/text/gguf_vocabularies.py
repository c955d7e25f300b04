"""Vocabularies made from a seed, as the metadata of a GGUF file, for the kinds of which no file is at hand."""

import random
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from tests.text.gguf_strings import texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in set(_PRINTABLE)]
_ALPHABET = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + i) for i, byte in enumerate(_OTHERS)}
_UTF8_BYTES = 0xF5  # higher ones are in no text
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def pairs_of_bytes(pre: str) -> dict[str, Any]:
    """Byte-level BPE in which most pairs of bytes merge, so that ids show where a text was split.

    Longer tokens have no merges: they appear only where a piece that is a token is taken whole.
    """
    words = ["Ġthe", "Hello", "Ġworld", "ĠHello", "123", "ĠI", "iPhone", "ĠĠĠĠ", "===", "ĊĊĊ"]
    tokens = [*(char for byte, char in _ALPHABET.items() if byte not in (0x0B, 0xE2)), "<|end|>", "<|bos|>", "<think>"]
    known = set(tokens)
    pairs = [(a, b) for a, b in _pairs() if a in known and b in known]
    kinds = [NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER_DEFINED]
    tokens += [a + b for a, b in pairs] + words
    kinds += [NORMAL] * (len(tokens) - len(kinds))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs],
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
    }


@cache
def _pairs() -> list[tuple[str, str]]:
    draw = random.Random("pairs")
    pairs = []
    for a in range(_UTF8_BYTES):
        for b in range(_UTF8_BYTES):
            both_ascii, none_ascii = max(a, b) < 0x80, min(a, b) >= 0x80
            if draw.random() < (0.5 if both_ascii else 0.2 if none_ascii else 0.05):
                pairs.append((_ALPHABET[a], _ALPHABET[b]))
    draw.shuffle(pairs)
    return pairs


def channels() -> dict[str, Any]:
    """Tokens whose kind llama.cpp corrects by their text, and some whose text looks like the spelling of bytes."""
    made = pairs_of_bytes("gpt-4o")
    added = {
        **dict.fromkeys(("<|return|>", "<|call|>", "<|channel|>", "<|message|>", "<|eot_id|>"), CONTROL),
        **dict.fromkeys(("<fim_prefix>", "<|fim_pad|>", "<|file_sep|>", "</s>", "<|done|>", "<EOT>"), NORMAL),
        **dict.fromkeys(("<|tool_response>", "naïve", "<|start|>"), USER_DEFINED),
    }
    made["tokenizer.ggml.tokens"] += added
    made["tokenizer.ggml.token_type"] += added.values()
    made["tokenizer.ggml.token_type"][made["tokenizer.ggml.tokens"].index("ü")] = USER_DEFINED  # not the byte 0xFC
    made["tokenizer.ggml.eom_token_id"] = made["tokenizer.ggml.tokens"].index("<|done|>")
    return made


def sentencepiece() -> dict[str, Any]:
    """Tokens with scores, byte fallback and a prefix space, as Llama 2's."""
    pieces = _pieces("▁", 4000)
    draw = random.Random("scores")
    runs = [char * count for char in "▁-=\n" for count in range(2, 17)]
    special = ["<unk>", "<s>", "</s>", "<|user|>", "[INST]"]
    kinds = [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, CONTROL] + [BYTE] * 256
    pieces = list(dict.fromkeys([*runs, *(piece for piece in pieces if piece not in special)]))
    scores = [0.0] * len(kinds) + [-float(score) for score in draw.sample(range(10 * len(pieces)), len(pieces))]
    for i, run in enumerate(runs, start=len(kinds)):
        scores[i] = -1.0 if run[0] in "▁-" else scores[i]  # equal scores: the leftmost pair goes first
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*special, *_BYTES, *pieces],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds + [NORMAL] * len(pieces),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_eos_token": True,
    }


def gemma3() -> dict[str, Any]:
    """The same without a prefix space; runs of spaces, line breaks and HTML tags are user-defined tokens."""
    runs = [char * count for char in "\n " for count in range(2, 32)]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<unused7>"]
    own = [*runs, "<table>", "</table>", "<h1>"]
    pieces = [piece for piece in _pieces("▁", 4000) if piece not in {*special, *own}]
    tokens = [*special, *own, *_BYTES, *pieces]
    kinds = (
        [CONTROL] * 3 + [UNKNOWN] + [CONTROL] * 4 + [USER_DEFINED] * len(own) + [BYTE] * 256 + [NORMAL] * len(pieces)
    )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (len(tokens) - len(pieces)) + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }


def _pieces(space: str, count: int) -> list[str]:
    """Characters and parts of texts, each after the shorter part that it extends. Some characters are left out."""
    draw = random.Random("pieces")
    corpus = [text.replace(" ", space) for text in texts([], 2000, seed=1)]
    characters = sorted(set("".join(corpus)) - {"\0", "q"})  # llama.cpp reads a token up to a zero
    pieces = dict.fromkeys(char for char in characters if char.isascii() or char == space or draw.random() < 0.5)
    known = set(pieces)
    while len(pieces) < count:
        text = draw.choice(corpus)
        start = draw.randrange(len(text) + 1)
        for end in range(start + 2, min(len(text), start + draw.randrange(2, 10)) + 1):
            if not known.issuperset(text[start:end]):
                break
            pieces[text[start:end]] = None
    return list(pieces)


MADE: Mapping[str, Callable[[], dict[str, Any]]] = {
    "channels": channels,
    "sentencepiece": sentencepiece,
    "gemma3": gemma3,
}
