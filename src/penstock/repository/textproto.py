"""Reads protobuf's text format, in which Triton's config.pbtxt is written, into the values of its JSON form.

Source: https://protobuf.dev/reference/protobuf/textformat-spec/. A schema says which fields there are.
"""

import re
from typing import Any

MAX_BYTES = 256 << 10  # of a text
MAX_DEPTH = 32  # of nested messages

_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*)*(?:
    (?P<name>[A-Za-z_][A-Za-z0-9_]*) |
    (?P<number>[+-]?(?:0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?f?)) |
    (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*') |
    (?P<mark>[{}\[\]:;,-]) |
    (?P<end>\Z) )""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_KEY = object()  # the type of a map's keys: texts or numbers


class TextProtoError(ValueError):
    """The text is not in the format, or has a field that the schema does not have."""


class Map:
    """In a schema: a map whose values have this type."""

    def __init__(self, value: Any) -> None:
        self.value = value


def read_textproto(text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the message in a text. In `schema`, a field's type is `str`, `int` or `bool`, a schema for a message, a
    `Map`, or a list with the type of a repeated field. Enums are `str`.

    Raises TextProtoError, which names the line.
    """
    if len(text) > MAX_BYTES:
        raise TextProtoError(f"it has {len(text)} characters; the limit is {MAX_BYTES}")
    return _Reader(text).message(schema, "", 0)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at, self._start = text, 0, 0
        self._kind, self._value = "", ""
        self._next()

    def message(self, schema: dict[str, Any], closing: str, depth: int) -> dict[str, Any]:
        """Reads fields up to the `closing` mark, "" for the end of the text."""
        if depth > MAX_DEPTH:
            raise self._error(f"messages are nested more than {MAX_DEPTH} deep")
        found: dict[str, Any] = {}
        while not (self._value == closing if closing else self._kind == "end"):
            name = self._take("name", "the name of a field")
            if name not in schema:
                known = ", ".join(sorted(schema)) or "none"
                raise self._error(f"unknown field {name[:60]!r}; the fields here are {known}")
            self._field(found, name, schema[name], depth)
            if self._value in (",", ";"):
                self._next()
        if closing:
            self._next()
        return found

    def _field(self, found: dict[str, Any], name: str, kind: Any, depth: int) -> None:
        colon = self._value == ":"
        if colon:
            self._next()
        if isinstance(kind, Map):
            for entry in self._values([{"key": _KEY, "value": kind.value}], colon, depth):
                found.setdefault(name, {})[entry.get("key", "")] = entry.get("value", _empty(kind.value))
        elif isinstance(kind, list):
            found.setdefault(name, []).extend(self._values(kind, colon, depth))
        elif name in found:
            raise self._error(f"field {name!r} is there twice; leave one out")
        else:
            found[name] = self._one(kind, colon, depth)

    def _values(self, kind: list[Any], colon: bool, depth: int) -> list[Any]:
        if self._value != "[":
            return [self._one(kind[0], colon, depth)]
        self._next()
        found = []
        while self._value != "]":
            found.append(self._one(kind[0], True, depth))
            if self._value == ",":
                self._next()
            elif self._value != "]":
                raise self._error(f"found {self._value[:20]!r} in a list, where a comma or ] is needed")
        self._next()
        return found

    def _one(self, kind: Any, colon: bool, depth: int) -> Any:
        if isinstance(kind, dict):
            if self._value != "{":
                raise self._error(f"found {self._value[:20]!r}, where a message in {{}} is needed")
            self._next()
            return self.message(kind, "}", depth + 1)
        if not colon:
            raise self._error(f"found {self._value[:20]!r}, where a colon is needed")
        if kind is _KEY and self._kind == "number":
            return self._take("number", "a number")
        if kind in (str, _KEY):
            return self._string()
        if kind is bool:
            return self._switch()
        number = self._take("number", "a number")
        try:
            return int(number, 0)
        except ValueError:
            raise self._error(f"{number[:20]!r} is not a whole number") from None

    def _string(self) -> str:
        if self._kind == "name":  # the value of an enum
            return self._take("name", "a text")
        parts = [self._take("text", "a text in quotation marks")]
        while self._kind == "text":  # adjacent texts are one
            parts.append(self._take("text", "a text"))
        return "".join(_ESCAPE.sub(_unescaped, part[1:-1]) for part in parts)

    def _switch(self) -> bool:
        value = self._take(self._kind if self._kind in ("name", "number") else "name", "true or false")
        if value not in ("true", "True", "t", "1", "false", "False", "f", "0"):
            raise self._error(f"found {value[:20]!r}, where true or false is needed")
        return value in ("true", "True", "t", "1")

    def _take(self, kind: str, what: str) -> str:
        if self._kind != kind:
            raise self._error(f"found {self._value[:20]!r}, where {what} is needed" if self._value else f"{what} lacks")
        value = self._value
        self._next()
        return value

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            self._start = self._at
            raise self._error("a character is not expected here")
        self._kind = found.lastgroup or ""
        self._value = found[self._kind]
        self._start, self._at = found.start(self._kind), found.end()

    def _error(self, what: str) -> TextProtoError:
        return TextProtoError(f"line {self._text.count(chr(10), 0, self._start) + 1}: {what}")


def _empty(kind: Any) -> Any:
    return {} if isinstance(kind, dict) else kind()


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "01234567":
        return chr(int(code, 8))
    return chr(int(code[1:], 16)) if code[0] == "x" and len(code) > 1 else _ESCAPED.get(code, code)
