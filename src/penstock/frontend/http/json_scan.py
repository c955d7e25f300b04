"""Bounds what a JSON text makes a decoder do, while the text arrives and before it is decoded.

A decoder is one call that holds the event loop. A byte of text can cost it 100 ns, as in `[[],[],...]`, or 1 ns, as in
a long string. So the number of bytes does not bound its time; the numbers of strings, arrays, objects and values do.
"""

import json
import re

import orjson

from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACE = b" \t\n\r"
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BETWEEN = frozenset((b",", b", ", b",\n", b":", b": "))  # usual text between strings, without brackets
_ESCAPES = ((b"\\\\", b"\0\0"), (b'\\"', b"\0\1"))  # replaced so that each quote left begins or ends a string
_KEY_BYTES = 256  # longer keys are not compared
_NO_KEY = bytes(_KEY_BYTES + 1)  # in place of a longer string
_SHOWN = 100  # characters of a key in an error
_AT_BYTE = re.compile(r"\(byte (\d+)\)$")
_CONSTANT = re.compile(rb"NaN|-?Infinity")
# An escaped surrogate: a pair, which is right, or one alone, which is group 1.
_SURROGATE = re.compile(rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)")
_RAW_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")
_SMALL = 1 << 10  # bytes of a text that is decoded in place of a scan
_NEAR = 16  # bytes around an error in which its cause is looked for


class JsonScan:
    """Counts the parts of one JSON text. Feed it the text in pieces.

    The text need not be valid: up to its first error the counts are right, and a decoder stops there.
    """

    __slots__ = (
        *("_after_string", "_begun", "_broken", "_containers", "_held", "_inside", "_limits"),
        *("_open", "_quotes", "_string", "_values"),
    )

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._begun = False
        self._held = b""  # a backslash at the end of the last piece
        self._inside = False  # the last piece ended inside a string
        self._after_string = False  # it ended after a string and before the next character that is not a space
        self._string = b""  # the last string as far as it has arrived, or _NO_KEY
        self._open: list[set[bytes] | None] = []  # for each open object its keys so far, for each open array None
        self._broken = False  # the text is not valid JSON, which the decoder will say
        self._quotes = 0
        self._containers = 0
        self._values = 0

    def feed(self, piece: bytes) -> None:
        """Counts the next piece. Raises APIError 400 when a limit is passed, or for a key that an object has twice."""
        if self._broken:
            return
        if not self._begun:
            self._begun = True
            if len(piece) <= _SMALL and _is_fine(piece, self._limits):
                return  # it is the whole text: of what follows a decoder reads only spaces
        if self._held or b"\\" in piece:
            piece = self._without_escapes(piece)
        self._quotes += piece.count(b'"')
        self._check(self._quotes // 2, self._limits.max_json_strings, "strings")
        parts = piece.split(b'"')
        outside = b"".join(parts[self._inside :: 2])
        self._values += outside.count(b",")
        self._check(self._values, self._limits.max_json_values, "values")
        self._containers += outside.count(b"[") + outside.count(b"{")
        self._check(self._containers, self._limits.max_json_containers, "arrays and objects")
        *before_quotes, rest = parts
        for part in before_quotes:
            if self._inside:
                self._string = _joined(self._string, part)
                self._after_string = True
            else:
                self._structure(part)
                if self._broken:
                    return
                self._string = b""
            self._inside = not self._inside
        if self._inside:
            self._string = _joined(self._string, rest)
            self._after_string = False
        else:
            self._structure(rest)

    def _without_escapes(self, piece: bytes) -> bytes:
        """The piece with other bytes, as many, for escaped backslashes and quotes. A JSON text cannot have them."""
        piece = self._held + piece
        backslashes = len(piece) - len(piece.rstrip(b"\\"))
        self._held = b"\\" * (backslashes % 2)
        if self._held:
            piece = piece[:-1]
        for escape, bare in _ESCAPES:
            piece = piece.replace(escape, bare)
        return piece

    def _structure(self, text: bytes) -> None:
        """Follows the brackets in text outside strings."""
        if self._after_string:
            rest = text.lstrip(_SPACE)
            if rest:
                self._after_string = False
                if rest[0] == 0x3A:  # a colon
                    self._key()
        if text in _BETWEEN:
            return
        for bracket in text.translate(None, _NO_BRACKETS):
            if bracket in b"[{":
                self._open.append(set() if bracket == 0x7B else None)
                if len(self._open) > self._limits.max_json_depth:
                    raise _too_much(f"is nested more than {self._limits.max_json_depth} deep", "flatten it")
            elif not self._open or (self._open.pop() is None) != (bracket == 0x5D):
                self._broken = True
                return

    def _key(self) -> None:
        """Adds the last string to the keys of the innermost object."""
        key = self._string
        if key is _NO_KEY:
            return
        if b"\\" in key or b"\0" in key:
            key = _plain(key)
        keys = self._open[-1] if self._open else None
        if keys is None:  # a colon in an array
            self._broken = True
        elif key in keys:
            shown = key.decode("utf-8", "replace")[:_SHOWN]
            raise APIError(
                400,
                f"an object has the key {shown!r} twice; send it once",
                param=shown,
                code="duplicate_key",
                close=True,
            )
        else:
            keys.add(key)

    def _check(self, count: int, limit: int, what: str) -> None:
        if count > limit:
            raise _too_much(f"has more than {limit} {what}", "send less at a time")


def _is_fine(text: bytes, limits: RequestLimits) -> bool:
    """Returns whether a text is valid, within the limits, and no object in it has a key twice. This takes a tenth of
    the time of a scan. False: only a scan can tell.

    A decoder keeps the last member of those with the same key. So a text with one has more colons than what it decodes
    to: no escape but \\u writes a colon.
    """
    brackets = text.count(b"[") + text.count(b"{")
    if (
        brackets > min(limits.max_json_depth, limits.max_json_containers)
        or text.count(b'"') > 2 * limits.max_json_strings
        or text.count(b",") > limits.max_json_values
        or b"\\u" in text
    ):
        return False
    try:
        return orjson.dumps(orjson.loads(text)).count(b":") == text.count(b":")
    except ValueError:
        return False


def explain_json(text: bytes, error: str) -> str:
    """The decoder's error about a JSON text, in better words if a byte order mark, NaN, an infinity or half a surrogate
    is the cause."""
    if text.startswith(_BYTE_ORDER_MARK):
        return "it begins with a byte order mark (EF BB BF); save it as UTF-8 without one"
    place = int(found[1]) if (found := _AT_BYTE.search(error)) else len(text)
    near = text[max(0, place - _NEAR) : place + _NEAR]
    if constant := _CONSTANT.match(text, max(0, place - 1)) or _CONSTANT.match(text, place):
        return f"{constant[0].decode()} at byte {constant.start()} is not a number in JSON; send a finite one, or none"
    for surrogate in _SURROGATE.finditer(near):
        if surrogate[1]:
            code = surrogate[1].decode("ascii", "replace")
            return f"{code} near byte {place} is half of a surrogate pair; send both halves, or the character itself"
    return error


def explain_utf8(text: bytes) -> str:
    """Says where a text is not UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if _RAW_SURROGATE.match(text, error.start):
            return f"a surrogate at byte {error.start}; send the character itself"
        return f"{error.reason} at byte {error.start}"
    return "it has a byte that is not"


def _joined(string: bytes, part: bytes) -> bytes:
    return string + part if len(string) + len(part) <= _KEY_BYTES else _NO_KEY


def _plain(key: bytes) -> bytes:
    """A key without escapes, so that keys are equal if they mean the same."""
    for escape, bare in _ESCAPES:
        key = key.replace(bare, escape)
    try:
        return str(json.loads(b'"%b"' % key)).encode("utf-8", "surrogatepass")
    except ValueError:
        return key  # the decoder will refuse it


def _too_much(what: str, remedy: str) -> APIError:
    return APIError(400, f"the body {what}, the limit; {remedy}", code="body_too_complex", close=True)
