"""Finds the tokens that end an answer: those that any file of a model's folder names.

A fine-tune often changes the end in one file and leaves the base model's in the others. The union is right for both: a
model does not write the other token.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.gguf.json_file import MAX_BYTES, read_json_object

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")  # the second is only in older checkpoints


class EndToken(NamedTuple):
    """A token that ends an answer."""

    id: int
    text: str  # "" if the tokenizer's files do not list it
    files: tuple[str, ...]  # that name it


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The one field of tokenizer.json that is read here: the special tokens and their ids."""

    added_tokens: list[_AddedToken] = []


def find_end_tokens(folder: Path, named: Mapping[str, tuple[int, ...]], vocabulary: int) -> list[EndToken]:
    """Returns the ids in `named`, which has those of each file, and the tokenizer's eos_token. Ids that are not below
    `vocabulary` are left out. Raises ValueError, which names the file, if a file is broken."""
    texts = _added_tokens(folder)
    by_id: dict[int, list[str]] = {}
    for file, ids in {**named, **_of_tokenizer(folder, texts)}.items():
        for token_id in ids:
            by_id.setdefault(token_id, []).append(file)
    return [
        EndToken(token_id, texts.get(token_id, ""), tuple(files))
        for token_id, files in by_id.items()
        if token_id < vocabulary
    ]


def _of_tokenizer(folder: Path, texts: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
    """The id of the tokenizer's eos_token, by the file that names it; empty if there is none."""
    for file in _SETTINGS:
        wanted = _text(_settings(folder / file).get("eos_token"))
        if wanted is not None:
            return {file: tuple(token_id for token_id, text in texts.items() if text == wanted)[:1]}
    return {}


def _added_tokens(folder: Path) -> dict[int, str]:
    """The special tokens by id, as tokenizer_config.json or tokenizer.json lists them."""
    listed = _settings(folder / _SETTINGS[0]).get("added_tokens_decoder")
    if isinstance(listed, dict):
        return {int(key): _text(token) or "" for key, token in listed.items() if key.isdecimal()}
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        return {}
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}  # the reader of the tokenizer says what is wrong with the file
    return {token.id: token.content for token in tokens}


def _settings(path: Path) -> dict[str, Any]:
    return read_json_object(path, unique=False) if path.is_file() else {}


def _text(token: Any) -> str | None:
    """The text of a token, which is written as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
