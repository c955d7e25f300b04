"""The vocabulary in the metadata of a GGUF file: tokens, what each is, and the tokens that end a generation.

Files give some tokens a wrong type or leave out their ids, so llama.cpp corrects both by the token's text. The rules
here are those of `llama_vocab::impl::load` (llama.cpp, July 2026), so that prompts and stops are the same.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple

from penstock.gguf.header import GgufError, short

_PREFIX: Final = "tokenizer.ggml."
_ID_KEYS: Final = {  # name -> metadata keys of its id; the later ones are of older files
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}
_SENTENCEPIECE_IDS: Final = {"unk": 0, "bos": 1, "eos": 2}  # of files that do not name them
_FIM_TEXTS: Final = {  # fill in the middle
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_END_TEXTS: Final = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
_END_IDS: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_VISIBLE: Final = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # parts of an answer of gpt-oss
_KNOWN_TEXTS: Final = frozenset(
    (*_END_TEXTS, *_VISIBLE, "<|plamo:eos|>", *(text for texts in _FIM_TEXTS.values() for text in texts))
)


class TokenKind(IntEnum):
    """The kinds of tokens, numbered as in `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2  # matched in a text like a control token
    CONTROL = 3
    USER_DEFINED = 4  # matched in a text before it is tokenised, and shown in an output
    UNUSED = 5
    BYTE = 6


_KINDS: Final = {int(kind): kind for kind in TokenKind}


class Vocabulary(NamedTuple):
    """Tokens by id, and the ids with a meaning."""

    tokens: list[str]  # some files have a token twice
    kinds: list[TokenKind]
    scores: list[float] | None
    ids: dict[str, int]  # "bos", "eos", "eot", "eom", "unk", "sep", "pad", "mask", "fim_pre" …: only those that exist
    end_ids: tuple[int, ...]  # a generation ends at any of these, in ascending order


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in a file's metadata. Raises GgufError, without the file's name, if it is missing or broken."""
    tokens = _tokens(metadata)
    if not tokens:
        raise GgufError("the file has no tokenizer: tokenizer.ggml.tokens is missing or empty. Use another conversion")
    types = _values(metadata, "token_type", (int,), "integers", len(tokens))
    scores = _values(metadata, "scores", (int, float), "numbers", len(tokens))
    kinds = [_KINDS.get(number, TokenKind.UNDEFINED) for number in types] or [TokenKind.NORMAL] * len(tokens)
    meanings = _meanings(metadata, tokens)
    for token_id, kind in meanings.kinds.items():
        kinds[token_id] = kind
    return Vocabulary(tokens, kinds, scores or None, meanings.ids, tuple(sorted(meanings.end_ids)))


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The `end_ids` of the vocabulary; none if there is no vocabulary. Raises GgufError if it is not one of strings."""
    return tuple(sorted(_meanings(metadata, _tokens(metadata)).end_ids))


class _Meanings(NamedTuple):
    ids: dict[str, int]
    end_ids: set[int]
    kinds: dict[int, TokenKind]  # that differ from those in the file


def _meanings(metadata: Mapping[str, Any], tokens: Sequence[str]) -> _Meanings:
    index = {token: i for i, token in enumerate(tokens) if token in _KNOWN_TEXTS}
    ids = _ids(metadata, len(tokens))
    kinds: dict[int, TokenKind] = {}
    for name, texts in _FIM_TEXTS.items():
        found = [index[text] for text in texts if text in index]
        if name not in ids and found:
            ids[name] = min(found)
            kinds[ids[name]] = TokenKind.CONTROL
    ends = {index[text] for text in _END_TEXTS if text in index}
    kinds |= dict.fromkeys(ends, TokenKind.CONTROL)
    kinds |= dict.fromkeys([index[text] for text in _VISIBLE if text in index], TokenKind.USER_DEFINED)
    meanings = _Meanings(ids, ends | {ids[name] for name in _END_IDS if name in ids}, kinds)
    _correct_ends(index, meanings)
    return meanings


def _correct_ends(index: Mapping[str, int], meanings: _Meanings) -> None:
    """Removes two tokens that end a generation in some models and are part of it in others."""

    def ends(*texts: str) -> bool:
        return any(index.get(text) in meanings.end_ids for text in texts)

    channels = ends("<|return|>", "<|flush|>") and ends("<|call|>", "<|calls|>")
    for text, inside, kind in (
        ("<|end|>", channels, TokenKind.USER_DEFINED),  # the end of a channel of gpt-oss and Solar
        ("</s>", ends("<|tool_response>", "<|plamo:eos|>"), TokenKind.NORMAL),  # Gemma 4's HTML tag
    ):
        if inside and ends(text):
            meanings.end_ids.discard(index[text])
            meanings.kinds[index[text]] = kind


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(_values(metadata, "tokens", (str,), "strings"))]


def _ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    """The named ids. One outside the vocabulary counts as missing."""
    defaults = _SENTENCEPIECE_IDS if metadata.get("tokenizer.ggml.model") == "llama" else {}
    found = {name: token_id for name, token_id in defaults.items() if token_id < count}
    for name, keys in _ID_KEYS.items():
        for key in keys:
            value = metadata.get(_PREFIX + key)
            if type(value) is int and 0 <= value < count:
                found[name] = value
    return found


def _values(metadata: Mapping[str, Any], key: str, types: tuple[type, ...], what: str, least: int = 0) -> list[Any]:
    """An array of the metadata; an empty list if there is none. An array with fewer than `least` values is refused."""
    values = metadata.get(_PREFIX + key, [])
    if not isinstance(values, list) or not set(map(type, values)) <= set(types):
        raise GgufError(f"{_PREFIX}{key} is {short(values)}; expected an array of {what}. Use another conversion")
    if values and len(values) < least:
        raise GgufError(f"{_PREFIX}{key} has {len(values)} values for {least} tokens. Use another conversion")
    return values
