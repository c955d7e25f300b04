"""What each token adds to a text, as bytes.

A tokenizer's decoder is a chain of steps over token strings. In the chains that language models use, what a token adds
depends on the token alone, save at the very start of a text. So text can be made token by token, exactly and in
constant time, and only UTF-8 characters have to be put together across tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from penstock.text.errors import TokenizerError


class Decoder(NamedTuple):
    """A decoder of tokenizer.json, taken apart."""

    spell: Callable[[str, bool], bytes]  # (token, whether it is the first of its text) -> what it adds
    first_differs: bool  # whether `spell` looks at its second argument
    strip: bytes  # one ASCII character, or nothing
    strip_count: int  # so many of it are taken off the start of a text


class Pieces(dict[int, bytes]):
    """Token id -> bytes inside a text, filled as ids are asked for. Ids without a token add nothing."""

    def __init__(self, token_of: Callable[[int], str | None], decoder: Decoder, hidden: frozenset[int]) -> None:
        super().__init__()
        self.decoder = decoder
        self._token_of = token_of
        self._hidden = hidden

    def __missing__(self, token_id: int) -> bytes:
        token = self.visible(token_id)
        piece = b"" if token is None else self.decoder.spell(token, False)
        self[token_id] = piece
        return piece

    def visible(self, token_id: int) -> str | None:
        """The token, or None for an id that is hidden (a special token, skipped) or that names no token."""
        return None if token_id in self._hidden else self._token_of(token_id)


def read_decoder(spec: Mapping[str, Any] | None) -> Decoder:
    """Takes apart the `decoder` of tokenizer.json. Raises TokenizerError where text cannot be made token by token."""
    if spec is None:  # tokens are joined by spaces
        return Decoder(lambda token, first: ("" if first else " ").encode() + token.encode(), True, b"", 0)
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
                f"tokenizer.json has a decoder of {' + '.join(s['type'] for s in steps)}, where {kind} cannot be "
                f"streamed. Supported are ByteLevel, and {', '.join(_EDITS)}, ByteFallback, Fuse, Strip in this order"
            )

    def spell(token: str, first: bool) -> bytes:
        for edit in edits:
            token = edit(token, first)
        return to_bytes(token)

    return Decoder(spell, any(step["type"] == "Metaspace" for step in steps), strip, strip_count)


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


_EDITS: Mapping[str, Callable[[Mapping[str, Any]], Callable[[str, bool], str]]] = {
    "Replace": _replace,
    "Metaspace": _metaspace,
}


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            pass
    return token.encode()


def _byte_level() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable Latin-1 stands for its own byte, U+0100 and up for the other bytes in order.

    A token with any other character, as an added token may have, stands for itself.
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
