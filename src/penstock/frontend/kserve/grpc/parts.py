"""Bounds what decoding a ModelInferRequest costs, before it is decoded.

Two bytes of a message can become an object of 90 bytes, so the number of bytes does not bound time and memory; the
number of fields does. https://protobuf.dev/programming-guides/encoding/
"""

from collections.abc import Mapping
from typing import Any

from penstock.frontend.errors import APIError, invalid

_MAX_PARTS = 1024  # fields, those of nested messages included, and bytes of lists of numbers
_SMALL = 8 << 10  # bytes of a message that may be decoded in any case: at most 0.4 MB of objects

# The fields that hold messages, by number, with the same of those. None: a list of numbers.
_Fields = Mapping[int, "_Fields | None"]
_PAIR: _Fields = {2: {}}
_REQUEST: _Fields = {4: _PAIR, 5: {3: None, 4: _PAIR, 5: {1: None}}, 6: {2: _PAIR}}
_LEAF: Any = object()

_MAX_VARINT = 10  # bytes


def check_parts(message: bytes) -> None:
    """Raises APIError 400 for a large message with too many parts, or one that cannot be decoded."""
    if len(message) <= _SMALL:
        return
    try:
        _walk(message, 0, len(message), _REQUEST, 0)
    except IndexError:
        raise _broken() from None


def _walk(message: bytes, at: int, end: int, fields: _Fields, parts: int) -> int:
    """Returns the parts so far, and those between two places. Raises IndexError where the message is cut off."""
    while at < end:
        if parts >= _MAX_PARTS:
            raise _too_many()
        parts += 1
        tag = message[at]
        at += 1
        if tag > 127:
            tag, at = _varint(message, at - 1)
        match tag & 7:
            case 2:  # a length, and so many bytes
                size = message[at]
                at += 1
                if size > 127:
                    size, at = _varint(message, at - 1)
                inner = fields.get(tag >> 3, _LEAF)
                if inner is None:
                    parts += size
                elif inner is not _LEAF:
                    parts = _walk(message, at, min(at + size, end), inner, parts)
                at += size
            case 0:  # a number
                _, at = _varint(message, at)
            case 1:  # eight bytes
                at += 8
            case 5:  # four bytes
                at += 4
            case _:
                raise invalid("the message has a group, which no field of a ModelInferRequest is", "inputs")
    if parts > _MAX_PARTS:
        raise _too_many()
    return parts


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Returns the number at a place, and the place after it."""
    value = 0
    for shift in range(0, 7 * _MAX_VARINT, 7):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise _broken()


def _broken() -> APIError:
    return invalid("the message is cut off, or is no ModelInferRequest", "inputs")


def _too_many() -> APIError:
    return APIError(
        400,
        f"the message has more than {_MAX_PARTS} fields and numbers, the limit; send fewer inputs, outputs and "
        "parameters, with one element each",
        code="body_too_complex",
    )
