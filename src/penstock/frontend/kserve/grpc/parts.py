"""Bounds what decoding a ModelInferRequest costs, before it is decoded.

Two bytes of a message can become an object of 90 bytes, so the number of bytes does not bound time and memory; the
number of fields does. https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Mapping
from typing import Any

from penstock.frontend.errors import APIError, invalid

_MAX_PARTS = 1024  # fields, those of nested messages included, and bytes of lists of numbers

# The fields that hold messages, by number, with the same of those. None: a list of numbers.
_Fields = Mapping[int, "_Fields | None"]
_PAIR: _Fields = {2: {}}
_REQUEST: _Fields = {4: _PAIR, 5: {3: None, 4: _PAIR, 5: {1: None}}, 6: {2: _PAIR}}
_LEAF: Any = object()

_MAX_VARINT = 10  # bytes


def check_parts(message: bytes) -> None:
    """Raises APIError 400 for a message with too many parts, or one that cannot be decoded."""
    _Walk(message).walk(0, len(message), _REQUEST)


class _Walk:
    def __init__(self, message: bytes) -> None:
        self._message = message
        self._parts = 0

    def walk(self, at: int, end: int, fields: _Fields) -> None:
        """Counts the fields between two places."""
        while at < end:
            self._count(1)
            tag, at = self._varint(at)
            match tag & 7:
                case 0:  # a number
                    _, at = self._varint(at)
                case 1:  # eight bytes
                    at += 8
                case 5:  # four bytes
                    at += 4
                case 2:  # a length, and so many bytes
                    size, at = self._varint(at)
                    inner = fields.get(tag >> 3, _LEAF)
                    if inner is None:
                        self._count(size)
                    elif inner is not _LEAF:
                        self.walk(at, min(at + size, end), inner)
                    at += size
                case _:
                    raise invalid("the message has a group, which no field of a ModelInferRequest is", "inputs")

    def _count(self, parts: int) -> None:
        self._parts += parts
        if self._parts > _MAX_PARTS:
            raise APIError(
                400,
                f"the message has more than {_MAX_PARTS} fields and numbers, the limit; send fewer inputs, outputs and "
                "parameters, with one element each",
                code="body_too_complex",
            )

    def _varint(self, at: int) -> tuple[int, int]:
        """Returns the number at a place, and the place after it."""
        value = 0
        for i, byte in enumerate(self._message[at : at + _MAX_VARINT]):
            value |= (byte & 127) << 7 * i
            if byte < 128:
                return value, at + i + 1
        raise invalid("the message is cut off, or is no ModelInferRequest", "inputs")
