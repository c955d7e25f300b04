"""Finds the bytes that each token adds to a text.

A tokenizer's decoder is a chain of steps over token strings. In the chains that language models use, a token always
adds the same bytes, except at the start of a text. So text can be produced token by token, exactly and in constant
time. Only UTF-8 characters have to be put together across tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.text.errors import TokenizerError


class TokenDecoder(NamedTuple):
    """Holds the decoder of a tokenizer.json in the form that streaming needs."""

    bytes_of: Callable[[str, bool], bytes]  # (token, whether it is the first of its text) -> the bytes that it adds
    start_differs: bool  # whether the first token of a text can add other bytes
    strip: bytes  # one ASCII character, or nothing
    strip_count: int  # how many of it are removed from the start of a text


class TokenBytes(dict[int, bytes]):
    """Maps a token id to the bytes that it adds inside a text, made on first use. Unknown ids add nothing."""

    def __init__(self, token_of: Callable[[int], str | None], decoder: TokenDecoder, hidden: frozenset[int]) -> None:
        super().__init__()
        self.decoder = decoder
        self._token_of = token_of
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = self.visible(token_id)
        piece = b"" if token is None else self.decoder.bytes_of(token, False)
        self[token_id] = piece
        return piece

    def visible(self, token_id: int) -> str | None:
        """Returns the token, or None if the id is a special token that is skipped or is not in the vocabulary."""
        return None if token_id in self._hidden else self._token_of(token_id)


def read_decoder(spec: Mapping[str, Any] | None) -> TokenDecoder:
    """Reads the `decoder` of tokenizer.json. Raises TokenizerError if it cannot produce text token by token."""
    if spec is None:  # tokens are joined by spaces
        return TokenDecoder(lambda token, first: ("" if first else " ").encode() + token.encode(), True, b"", 0)
    steps = list(_flatten(spec))
    edits: list[Callable[[str, bool], str]] = []
    to_bytes: Callable[[str], bytes] = str.encode
    joined = False
    strip, strip_count = b"", 0
    for step in steps:
        kind = step["type"]
        if kind == "Fuse":
            joined = True
        elif kind == "Strip" and joined and not step["stop"] and step["content"].isascii() and not strip_count:
            strip, strip_count = step["content"].encode(), step["start"]
        elif kind in ("ByteLevel", "ByteFallback") and not joined and to_bytes is str.encode:
            to_bytes, joined = (_byte_level(), True) if kind == "ByteLevel" else (_byte_fallback, joined)
        elif kind in _EDITS and not joined and to_bytes is str.encode:
            edits.append(_EDITS[kind](step))
        else:
            raise TokenizerError(
                f"tokenizer.json has a decoder of {' + '.join(s['type'] for s in steps)}, of which {kind} cannot be "
                f"streamed. Supported are ByteLevel, and {', '.join(_EDITS)}, ByteFallback, Fuse, Strip in this order"
            )

    def bytes_of(token: str, first: bool) -> bytes:
        for edit in edits:
            token = edit(token, first)
        return to_bytes(token)

    return TokenDecoder(bytes_of, any(step["type"] in _DIFFER_AT_START for step in steps), strip, strip_count)


def _flatten(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if spec["type"] != "Sequence":
        return [spec]
    return [step for inner in spec["decoders"] for step in _flatten(inner)]


def _replace(step: Mapping[str, Any]) -> Callable[[str, bool], str]:
    pattern, content = step["pattern"], step["content"]
    if "String" not in pattern:
        raise TokenizerError(
            "tokenizer.json has a decoder that replaces by regular expression; only strings are supported"
        )
    old = pattern["String"]
    return lambda token, first: token.replace(old, content)


def _metaspace(step: Mapping[str, Any]) -> Callable[[str, bool], str]:
    mark, dropped_at_start = step["replacement"], step["prepend_scheme"] != "never"
    return lambda token, first: token.replace(mark, "" if first and dropped_at_start else " ")


def _word_piece(step: Mapping[str, Any]) -> Callable[[str, bool], str]:
    """As decoded without `cleanup`, which changes text that is already out. Encoders have such tokenizers."""
    prefix = step["prefix"]
    return lambda token, first: token.removeprefix(prefix) if first or token.startswith(prefix) else f" {token}"


_EDITS: Mapping[str, Callable[[Mapping[str, Any]], Callable[[str, bool], str]]] = {
    "Replace": _replace,
    "Metaspace": _metaspace,
    "WordPiece": _word_piece,
}
_DIFFER_AT_START = ("Metaspace", "WordPiece")


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.encode()


def _byte_level() -> Callable[[str], bytes]:
    """Returns a reader of GPT-2's alphabet: printable Latin-1 characters are their own bytes, U+0100 and up the others.

    A token with any other character, such as an added token, is plain UTF-8.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:
            return token.encode()

    return to_bytes
