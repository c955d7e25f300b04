"""Reads request bodies within limits and decodes them with strict types. Errors name the parameter."""

import asyncio
import difflib
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec

from penstock.frontend.describe import unsupported_fields
from penstock.frontend.errors import APIError, ClientGone, invalid
from penstock.frontend.http.asgi import Receive, Scope, first_value
from penstock.frontend.http.buffers import HeldBytes
from penstock.frontend.http.json_scan import JsonScan, explain_json, explain_utf8
from penstock.frontend.limits import RequestLimits
from penstock.tasks import TimeLimit

T = TypeVar("T")

_SMALL = 2 << 10  # bytes that are scanned at once
_SCANNED_AT_ONCE = 8 << 10  # bytes in a turn: 3 ms at worst

_FORM_BYTES = 64 << 10  # of an upload beside its file

_GOT_FLOAT = "got `float`"
_WHOLE = re.compile(rb'((?<!\\)"[A-Za-z_]{1,40}"[ \t\r\n]*:[ \t\r\n]*-?[0-9]{1,18})\.0{1,18}(?=[ \t\r\n]*[,}])')
_REWRITTEN = 64 << 10  # bytes of a body in which whole numbers are rewritten: 9 ms at worst
_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`$")
_WRONG_TYPE = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<given>[^`]*)`$")
_TYPES = {  # msgspec's name: what a client calls it
    "array": "an array",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "object": "an object",
    "str": "a string",
}


async def read_body(
    scope: Scope,
    receive: Receive,
    limits: RequestLimits,
    held: HeldBytes,
    *,
    any_type: bool = False,
    binary: bool = False,
) -> bytes:
    """Returns the whole body, whose size is added to `held` while it arrives. With `any_type` it may have any type.
    With `binary`, a header may say that data follows the JSON.

    Raises APIError as soon as a limit is passed, and ClientGone. The errors: 400 if decoding the body would take too
    long, 408, 413, 415, and 429 if the server buffers too many bodies.
    """
    _check_headers(scope["headers"], limits, any_type)
    try:
        with TimeLimit(limits.body_timeout):
            return await _read(receive, limits, held, _json_length(scope) if binary else None)
    except TimeoutError:
        message = f"the body did not arrive within {limits.body_timeout:g} s; send it faster"
        raise APIError(408, message, code="body_timeout", close=True) from None


@asynccontextmanager
async def read_upload(scope: Scope, receive: Receive, limits: RequestLimits) -> AsyncIterator[AsyncIterator[bytes]]:
    """Gives the pieces of a body that may be larger than others. The block must end within a time that depends on the
    body's size. Raises APIError 408, 413 or 415, and ClientGone."""
    most = limits.max_file_bytes + _FORM_BYTES
    length = most
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = _length(value, most)
        elif name == b"content-encoding":
            _check_encoding(value)
    if length > most:
        message = f"the body has {length} bytes; the limit is {limits.max_file_bytes} for a file: divide it"
        raise APIError(413, message, code="file_too_large", close=True)

    text = f"the body is larger than {most} bytes; the limit is {limits.max_file_bytes} for a file: divide it"
    too_large = APIError(413, text, code="file_too_large", close=True)
    seconds = limits.body_timeout + length / limits.min_upload_rate
    try:
        async with asyncio.timeout(seconds):
            yield _pieces(receive, most, too_large)
    except TimeoutError:
        message = f"the file did not arrive within {seconds:.0f} s; send it faster"
        raise APIError(408, message, code="body_timeout", close=True) from None


def decode(kind: type[T], body: bytes) -> T:
    """Returns the body as an object of this type. Raises APIError 400, which names the parameter if one is wrong.

    A whole number for an integer may be written as 40.0, as clients in Lua, R and JavaScript do.
    """
    if not body:
        raise invalid("the body is empty; send a JSON object", code="invalid_json")
    try:
        if not body.isascii():
            body.decode()  # the decoder does not look into a msgspec.Raw
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        whole = body
        if _GOT_FLOAT in str(error) and len(body) <= _REWRITTEN:
            whole = _WHOLE.sub(rb"\1", body)
        if whole != body:
            return decode(kind, whole)
        raise _invalid_value(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not valid JSON: {explain_json(body, str(error))}", code="invalid_json") from None
    except UnicodeDecodeError:
        raise invalid(f"the body is not UTF-8: {explain_utf8(body)}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply; flatten it", code="invalid_json") from None


def refuse_unsupported(fields: msgspec.Struct, where: str = "") -> None:
    """Raises APIError 400 for a parameter that is declared `unsupported` and has a value with an effect.

    `where` is the path of `fields` in the body, with a dot at its end.
    """
    for name, accepted in unsupported_fields(type(fields)).items():
        value = getattr(fields, name)
        if value is not None and value not in accepted:
            raise invalid(
                f"{where}{name} is not supported by this server; leave it out", where + name, "unsupported_parameter"
            )


def _check_headers(headers: list[tuple[bytes, bytes]], limits: RequestLimits, any_type: bool) -> None:
    """Raises APIError 413 or 415."""
    typed = any_type
    for name, value in headers:
        if name == b"content-length":
            if _length(value, limits.max_body_bytes) > limits.max_body_bytes:
                raise _too_large(limits)
        elif name == b"content-encoding":
            _check_encoding(value)
        elif name == b"content-type":
            typed = True
            if not (any_type or _is_json(value)):
                kind = value[:100].decode("latin-1")
                raise APIError(415, f"content-type {kind!r} is not accepted; send application/json", close=True)
    if not typed:  # a browser sends this for a page of any site, without a preflight request
        raise APIError(415, "there is no content-type; send Content-Type: application/json", close=True)


def _length(value: bytes, most: int) -> int:
    """The number in Content-Length; one that is no number, or has too many digits, is above `most`."""
    return int(value) if value.isdigit() and len(value) < 20 else most + 1


def _json_length(scope: Scope) -> int | None:
    """The bytes of JSON before binary data in KServe's protocol; None if the whole body is JSON."""
    value = first_value(scope["headers"], b"inference-header-content-length")
    return int(value) if value is not None and value.isdigit() and len(value) < 12 else None


def _check_encoding(value: bytes) -> None:
    if value.strip().lower() not in (b"", b"identity"):
        raise APIError(415, "compressed bodies are not accepted; send it without content-encoding", close=True)


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or kind.endswith(b"+json")


async def _read(receive: Receive, limits: RequestLimits, held: HeldBytes, left: int | None) -> bytes:
    """`left` is the number of bytes that are JSON; None: all."""
    chunks: list[bytes] = []
    scan, size, more = JsonScan(limits), 0, True
    while more:
        chunk, more = await _piece(receive)
        size += len(chunk)
        if size > limits.max_body_bytes:
            raise _too_large(limits)
        if not chunk:
            continue
        held.add(len(chunk))
        if left is None:
            await _feed(scan, chunk, held)
        elif left > 0:
            await _feed(scan, chunk[:left], held)
            left -= len(chunk)
        chunks.append(chunk)
    body = b"".join(chunks)
    if len(body) > _SCANNED_AT_ONCE:  # decoding it comes next
        await held.turn()
    return body


async def check_json(text: bytes, limits: RequestLimits, held: HeldBytes) -> None:
    """Raises APIError 400 for a text that takes long to decode, or has a key twice."""
    await _feed(JsonScan(limits), text, held)


async def _feed(scan: JsonScan, piece: bytes, held: HeldBytes) -> None:
    if len(piece) <= _SMALL:
        scan.feed(piece)
        return
    for start in range(0, len(piece), _SCANNED_AT_ONCE):
        await held.turn()
        scan.feed(piece[start : start + _SCANNED_AT_ONCE])


async def _pieces(receive: Receive, most: int, too_large: APIError) -> AsyncGenerator[bytes, None]:
    """Gives the body as it arrives. Raises `too_large` after `most` bytes, and ClientGone."""
    size, more = 0, True
    while more:
        piece, more = await _piece(receive)
        size += len(piece)
        if size > most:
            raise too_large
        if piece:
            yield piece


async def _piece(receive: Receive) -> tuple[bytes, bool]:
    """The next piece of a body, which may be empty, and whether more may come. Raises ClientGone."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message.get("body", b""), message.get("more_body", False)


def _too_large(limits: RequestLimits) -> APIError:
    return APIError(
        413,
        f"the body is larger than {limits.max_body_bytes} bytes; send less, or raise the server's --max-body-size",
        code="body_too_large",
        close=True,
    )


def _invalid_value(text: str, body_type: Any) -> APIError:
    path = ""
    if found := _PATH.search(text):
        path = found["path"]
        text = text[: found.start()]
    if unknown := _UNKNOWN.match(text):
        name = _join(path, unknown["field"])
        meant = "" if path else _nearest(name, body_type)
        remedy = f"did you mean {meant}?" if meant else "leave it out"
        return invalid(f"unknown parameter {_short(name)!r}; {remedy}", _short(name), "unknown_parameter")
    if missing := _MISSING.match(text):
        name = _join(path, missing["field"])
        return invalid(f"{name} is missing", name, "missing_parameter")
    return invalid(f"{path or 'the body'} {_what_is_wrong(text)}", path or None, "invalid_value")


def _nearest(name: str, body_type: Any) -> str:
    """Returns the supported parameter of the body whose name is nearest, or "" if none is near."""
    if not (isinstance(body_type, type) and issubclass(body_type, msgspec.Struct)):
        return ""
    known = {each.encode_name for each in msgspec.structs.fields(body_type)} - unsupported_fields(body_type).keys()
    return next(iter(difflib.get_close_matches(name[:100], sorted(known), n=1)), "")


def _what_is_wrong(text: str) -> str:
    """Rewords msgspec's error about a value for a client."""
    if wrong := _WRONG_TYPE.match(text):
        wanted = [_TYPES.get(name, name) for name in wrong["wanted"].split(" | ") if name != "null"]
        given = _TYPES.get(wrong["given"], wrong["given"])
        return f"is {given}; it must be {' or '.join(wanted)}"
    if text.endswith("out of range"):
        return "has too many digits; send a smaller number"
    return f"is wrong: {text[:1].lower()}{text[1:]}".replace("`", "")


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


def _short(name: str, limit: int = 100) -> str:
    """A name that the client made up, cut so that the error stays readable."""
    return name if len(name) <= limit else name[:limit] + "..."
