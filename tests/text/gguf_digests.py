"""Digests of what llama.cpp makes of the texts of `gguf_strings`, for every vocabulary.

    PYTHONPATH=src:. python tests/text/gguf_digests.py VOCABULARY.gguf …

runs where llama-cpp-python and gguf are installed, which the test suite does not need, and writes gguf_digests.json:
the vocabularies named, those of `gguf_vocabularies`, and every pre-tokeniser. Other vocabularies keep their digests.
"""

import hashlib
import json
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.gguf import read_gguf
from tests.text.gguf_strings import COUNT, SEED, texts
from tests.text.gguf_vocabularies import MADE, pairs_of_bytes

STORE = Path(__file__).with_suffix(".json")
MODES = {"parsed": True, "plain": False}  # are special tokens parsed, and BOS and EOS added?
SPLIT_TEXTS = 1000  # for each pre-tokeniser
_TEXTS_A_DIGEST = 100
_DIGITS = 8
# Read by its path: the package it is in imports more than llama.cpp's environment has.
_PRE_TOKENIZERS = Path(__file__).parents[2] / "src/penstock/text/gguf_pretokenizers.py"
_SPECIAL_TYPES = (2, 3, 4)  # unknown, control, user-defined


def inputs(metadata: Mapping[str, Any], count: int = COUNT, seed: int = SEED) -> list[str]:
    """The texts for a vocabulary, with its special tokens in some."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind in _SPECIAL_TYPES and token]
    found = texts(special, count, seed)
    if "phi3" in metadata.get("general.name", "").lower():
        # After a special token, the tokenizers library drops any blanks, as transformers does, and llama.cpp ASCII's.
        return [re.sub(r"[^\S\t-\r ]", "", text) for text in found]
    return found


def digests(rows: Iterable[Sequence[int]]) -> str:
    """One digest for each hundred rows, joined."""
    lines = [",".join(map(str, row)) for row in rows]
    parts = (";".join(lines[start : start + _TEXTS_A_DIGEST]) for start in range(0, len(lines), _TEXTS_A_DIGEST))
    return "".join(hashlib.sha256(part.encode()).hexdigest()[:_DIGITS] for part in parts)


def different(ours: str, theirs: str) -> list[str]:
    """The texts whose digests differ, as ranges."""
    assert len(ours) == len(theirs)
    places = range(0, len(ours), _DIGITS)
    return [
        f"{i // _DIGITS * _TEXTS_A_DIGEST} to {(i // _DIGITS + 1) * _TEXTS_A_DIGEST - 1}"
        for i in places
        if ours[i : i + _DIGITS] != theirs[i : i + _DIGITS]
    ]


def pieces_digest(count: int, piece: Callable[[int], bytes]) -> str:
    """A digest of the bytes of every token."""
    digest = hashlib.sha256()
    for token_id in range(count):
        data = piece(token_id)
        digest.update(len(data).to_bytes(4, "little") + data)
    return digest.hexdigest()[: 2 * _DIGITS]


class _Peer:
    """llama.cpp with the vocabulary of one file."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        self._model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        self._library = llama_cpp
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model.model)

    def record(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        found = inputs(metadata)
        ids = range(self._model.n_vocab())
        return {
            **{mode: self.digests(found, mode) for mode in MODES},
            "end_ids": [i for i in ids if self._library.llama_vocab_is_eog(self._vocabulary, i)],
            **{f"pieces_{name}": pieces_digest(len(ids), self._piece(shown)) for name, shown in _SHOWN.items()},
        }

    def digests(self, found: Iterable[str], mode: str) -> str:
        parse = MODES[mode]
        return digests(self._model.tokenize(text.encode(), add_bos=parse, special=parse) for text in found)

    def _piece(self, shown: bool) -> Callable[[int], bytes]:
        import ctypes

        buffer = ctypes.create_string_buffer(4096)

        def piece(token_id: int) -> bytes:
            size = self._library.llama_token_to_piece(self._vocabulary, token_id, buffer, len(buffer), 0, shown)
            assert size >= 0
            if b"[UNK_BYTE_" in buffer.raw[:size]:  # a token of characters that spell no bytes: here it is its text
                return bytes(self._library.llama_vocab_get_text(self._vocabulary, token_id))
            return buffer.raw[:size]

        return piece


_SHOWN = {"with_special": True, "without_special": False}


def write(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A GGUF file with this metadata. A value of None is left out."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in metadata.items():
        if value is not None:
            writer.add_key_value(key, value, *_value_types(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _value_types(value: Any) -> tuple[Any, ...]:
    from gguf import GGUFValueType as Type

    if not isinstance(value, list):
        kinds = {str: Type.STRING, bool: Type.BOOL, int: Type.UINT32}
        return (kinds[type(value)],)
    return Type.ARRAY, {str: Type.STRING, int: Type.INT32, float: Type.FLOAT32}[type(value[0])]


def _made(metadata: Mapping[str, Any], folder: str) -> _Peer:
    return _Peer(write(Path(folder) / "made.gguf", metadata))


def _collect(paths: Iterable[Path]) -> Iterator[tuple[str, str, Any]]:
    """(section, name, record)"""
    for path in paths:
        yield "vocabularies", path.stem, _Peer(path).record(read_gguf(path).metadata)
    with tempfile.TemporaryDirectory() as folder:
        for name, make in MADE.items():
            yield "made", name, _made(make(), folder).record(make())
        for name in sorted(runpy.run_path(str(_PRE_TOKENIZERS))["PRE_TOKENIZERS"]):
            metadata = pairs_of_bytes(name)
            found = inputs(metadata, SPLIT_TEXTS)
            yield "pre_tokenizers", name, _made(metadata, folder).digests(found, "parsed")


def _store(paths: Iterable[Path]) -> None:
    import llama_cpp

    saved = json.loads(STORE.read_text()) if STORE.is_file() else {}
    saved["llama_cpp_python"] = llama_cpp.__version__
    for section, name, record in _collect(paths):
        saved.setdefault(section, {})[name] = record
        print(name, flush=True)
    for section in ("vocabularies", "made", "pre_tokenizers"):
        saved[section] = dict(sorted(saved.get(section, {}).items()))
    STORE.write_text(json.dumps(saved, indent=1) + "\n")


if __name__ == "__main__":
    _store(map(Path, sys.argv[1:]))
