"""Reads multipart/form-data (RFC 7578) as it arrives, in constant memory.

A parser of our own is 80 lines: it refuses what no client sends, and each of its bounds is checked before more is
buffered. Starlette's form parser needs another package, and writes a whole file to disk before its caller sees a byte.
"""

import re
from collections.abc import AsyncIterator
from typing import NamedTuple

from penstock.frontend.errors import APIError, invalid

_BOUNDARY = re.compile(
    rb'multipart/form-data\s*;.*?\bboundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70})(?=[\s;]|$))', re.I | re.DOTALL
)
_NAME = re.compile(rb'[;\s]name="([^"\r\n]{0,200})"', re.I)
_FILENAME = re.compile(rb'[;\s]filename="((?:[^"\\\r\n]|\\.){0,2000})"', re.I)
_FILENAME_UTF8 = re.compile(rb"[;\s]filename\*=", re.I)
_MAX_HEADERS = 4096  # bytes, of one part
_MAX_PARTS = 16


class FormPart(NamedTuple):
    """The begin of a part, without its content."""

    name: str
    filename: str | None  # None: the part is a field


def read_boundary(content_type: bytes) -> bytes:
    """The boundary of a form. Raises APIError 415."""
    if found := _BOUNDARY.match(content_type.strip()):
        return bytes(found[1] or found[2])
    shown = content_type[:100].decode("latin-1")
    raise APIError(415, f"content-type {shown!r} is not accepted; send multipart/form-data with a boundary", close=True)


async def read_form(chunks: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[FormPart | bytes]:
    """Yields each part, and then its content in pieces. Raises APIError 400 for what is not a form."""
    buffer = bytearray(b"\r\n")  # the first delimiter has no line before it
    delimiter = b"\r\n--" + boundary
    parts = 0

    async def more() -> None:
        async for chunk in chunks:
            if chunk:
                buffer.extend(chunk)
                return
        raise _wrong("it ends before its last boundary")

    async def take(count: int) -> bytes:
        while len(buffer) < count:
            await more()
        taken = bytes(buffer[:count])
        del buffer[:count]
        return taken

    if await take(len(delimiter)) != delimiter:
        raise _wrong("it does not begin with its boundary")
    while (ending := await take(2)) != b"--":
        parts += 1
        if ending != b"\r\n" or parts > _MAX_PARTS:
            raise _wrong(f"it has more than {_MAX_PARTS} parts" if ending == b"\r\n" else "a boundary has no end")
        while (end := buffer.find(b"\r\n\r\n", 0, _MAX_HEADERS)) < 0:
            if len(buffer) >= _MAX_HEADERS:
                raise _wrong(f"the headers of a part have more than {_MAX_HEADERS} bytes")
            await more()
        yield _read_headers(await take(end + 4))
        buffer[:0] = b"\r\n"  # an empty part's delimiter follows its headers at once
        first = 2
        while (end := buffer.find(delimiter)) < 0:
            sure = len(buffer) - len(delimiter) + 1
            if sure > first:
                data = bytes(buffer[first:sure])
                del buffer[:sure]
                first = 0
                yield data
            await more()
        if end > first:
            yield bytes(buffer[first:end])
        del buffer[: end + len(delimiter)]
    async for _ in chunks:  # what follows the last boundary
        pass


def _read_headers(headers: bytes) -> FormPart:
    for line in headers.split(b"\r\n"):
        if line[:20].lower() != b"content-disposition:":
            continue
        name, filename = _NAME.search(line), _FILENAME.search(line)
        if name is None:
            break
        if filename is None and _FILENAME_UTF8.search(line):
            raise _wrong('a part has filename*; send filename="..." in UTF-8')
        shown = None if filename is None else _decode(filename[1])
        return FormPart(_decode(name[1]), shown)
    raise _wrong('a part has no Content-Disposition with a name="..."')


def _decode(value: bytes) -> str:
    try:
        return re.sub(r"\\(.)", r"\1", value.decode())
    except UnicodeDecodeError:
        raise _wrong("a name is not UTF-8") from None


def _wrong(what: str) -> APIError:
    return invalid(f"the body is not valid multipart/form-data: {what}", code="invalid_form")
