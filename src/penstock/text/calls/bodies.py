"""Reads the name and the arguments of one call, and writes the arguments as JSON.

Each reader returns False if the text is no call. It has then written nothing, so that the text can become content.
Once a reader has begun a call, it returns True: the arguments are then what the model wrote.
"""

import ast
import json
import math
import re
from collections.abc import Mapping, Set
from typing import Any

from penstock.text.calls.cursor import Cursor, Markers, Reading
from penstock.text.calls.formats import JsonArguments, JsonObject, PythonCall, TaggedArguments, ToolFormat
from penstock.text.calls.parts import PartWriter

_NAME_CHARS = 256
_BLANKS_AFTER_VALUE = 256  # more of them are part of the value
_KEYS = frozenset(("id", "type", "name", "arguments", "parameters"))
_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
_PYTHON_NAMES = {"true": True, "false": False, "null": None}


def read_body(format: ToolFormat, cursor: Cursor, writer: PartWriter) -> Reading[bool]:
    """Reads a call from behind its head."""
    match format.body:
        case JsonObject() as body:
            return (yield from _json_object(format, body, cursor, writer))
        case PythonCall():
            return (yield from _python_call(cursor, writer))
        case body:
            name, written_id = yield from _name(format, cursor)
            if name is None:
                return False
            if format.mid.strip():
                yield from cursor.after_blanks(format.mid.strip())
            if isinstance(body, JsonArguments):
                return (yield from _json_arguments(name, written_id, cursor, writer))
            yield from _tagged(name, format, body, cursor, writer)
            return True


def _name(format: ToolFormat, cursor: Cursor) -> Reading[tuple[str | None, str | None]]:
    text = yield from cursor.before(Markers(format.name_end), _NAME_CHARS)
    found = None if text is None else re.fullmatch(format.name_pattern, text.strip())
    if found is None:
        return None, None
    return found["name"], found.groupdict().get("id")


def _json_arguments(name: str, written_id: str | None, cursor: Cursor, writer: PartWriter) -> Reading[bool]:
    if (yield from cursor.blanks()) != "{":
        return False
    writer.call(name, written_id)
    yield from cursor.json_container(writer.arguments)
    return True


def _json_object(format: ToolFormat, body: JsonObject, cursor: Cursor, writer: PartWriter) -> Reading[bool]:
    """Reads {"name": ..., "arguments": {...}}. The keys may come in any order."""
    name: str | None = None
    early: list[str] = []  # arguments that came before the name
    begun = False
    written_id: str | None = None
    if not (yield from cursor.after_blanks("{")):
        return False
    while True:
        key = yield from _key(cursor, writer.limits.header_chars)
        if key not in _KEYS:
            return begun
        if key in (body.arguments_key, "arguments", "parameters") and not begun:
            if name is not None:
                writer.call(name, written_id)
                begun = True
            if not (yield from _arguments(cursor, writer, None if begun else early)):
                return begun
        else:
            value = yield from _text_value(cursor, writer.limits.header_chars)
            if value is None:
                return begun
            if key == "name" and not begun:
                name = value
                if not name or (format.whole_answer and name not in writer.schemas):
                    return False
            elif key == "id" and format.id_style == "short" and re.fullmatch(r"[A-Za-z0-9]{9}", value):
                written_id = value
        char = yield from cursor.blanks()
        if char == ",":
            cursor.take(1)
            continue
        if char == "}":
            cursor.take(1)
            break
        return begun
    if begun or name is None:
        return begun
    writer.call(name, written_id)
    writer.arguments("".join(early) or "{}")
    return True


def _key(cursor: Cursor, limit: int) -> Reading[str | None]:
    yield from cursor.blanks()
    text = yield from cursor.json_string(limit)
    if text is None or not (yield from cursor.after_blanks(":")):
        return None
    return _decoded(text)


def _text_value(cursor: Cursor, limit: int) -> Reading[str | None]:
    char = yield from cursor.blanks()
    if char == '"':
        text = yield from cursor.json_string(limit)
        return None if text is None else _decoded(text)
    return (yield from cursor.scalar(64))


def _arguments(cursor: Cursor, writer: PartWriter, early: list[str] | None) -> Reading[bool]:
    """Reads the value of "arguments": an object, or an object written as a string."""
    emit = writer.arguments if early is None else early.append
    char = yield from cursor.blanks()
    if char == "{" or char == "[":
        if early is None:
            return (yield from cursor.json_container(emit))
        return (yield from _early_arguments(cursor, early, writer.limits.argument_chars))
    if char == '"':
        text = yield from cursor.json_string(writer.limits.argument_chars)
        emit((_decoded(text or "") or "").strip() or "{}")
        return text is not None
    text = yield from cursor.scalar(64)
    emit("{}" if text in (None, "null") else text or "{}")
    return text is not None


def _early_arguments(cursor: Cursor, early: list[str], limit: int) -> Reading[bool]:
    size = 0

    def emit(text: str) -> None:
        nonlocal size
        size += len(text)
        if size <= limit:
            early.append(text)

    return (yield from cursor.json_container(emit)) and size <= limit


def _decoded(text: str) -> str | None:
    """Returns the value of a JSON string, or None if it is none or cannot be sent as UTF-8."""
    try:
        value = json.loads(text, strict=False)
        if not isinstance(value, str):
            return None
        value.encode()
    except ValueError:  # UnicodeEncodeError is one
        return None
    return value


def _tagged(name: str, format: ToolFormat, body: TaggedArguments, cursor: Cursor, writer: PartWriter) -> Reading[None]:
    writer.call(name, None)
    properties = writer.schemas.get(name, {}).get("properties")
    types = properties if isinstance(properties, dict) else {}
    key_close = Markers((body.key_close.strip(),))
    count = 0
    while (yield from cursor.after_blanks(body.key_open)):
        key = yield from cursor.before(key_close, _NAME_CHARS)
        if key is None:
            break
        yield from cursor.literal(body.key_close.strip())
        if body.value_open and not (yield from cursor.after_blanks(body.value_open)):
            break
        key = key.strip()
        writer.arguments(("{" if not count else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        count += 1
        yield from _tagged_value(types.get(key), format, body, cursor, writer)
    writer.arguments("{}" if not count else "}")


def _tagged_value(
    schema: Any, format: ToolFormat, body: TaggedArguments, cursor: Cursor, writer: PartWriter
) -> Reading[None]:
    """Reads one value up to its closing tag. A text is passed on as it arrives.

    A value may contain the tag itself, as files do that a tool writes. It ends at a tag that another argument, the end
    of the call, another call, or nothing follows.
    """
    plain = is_text(schema)
    close, followers = Markers((body.value_close,)), format.after_value
    if body.line_breaks:
        yield from cursor.literal("\n")
    if plain:
        writer.arguments('"')
    parts: list[str] = []
    held = ""  # a line break that may precede the closing tag
    while True:
        text, marker = cursor.up_to(close)
        text = held + text
        held = "\n" if body.line_breaks and text.endswith("\n") else ""
        text = text[: len(text) - len(held)]
        if plain:
            writer.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            parts.append(text)
        if marker is not None:
            if (yield from cursor.followed_by(followers, _BLANKS_AFTER_VALUE)):
                break
            held += marker
        elif cursor.ended:
            break
        else:
            yield
    if marker is None and held:  # the text ended inside the value
        parts.append(held)
        if plain:
            writer.arguments(json.dumps(held)[1:-1])
    writer.arguments('"' if plain else _as_json("".join(parts), _kinds_of(schema)))


def is_text(schema: Any) -> bool:
    """True if a value of this schema can only be a string, or if nothing is declared."""
    if not isinstance(schema, dict):
        return schema is None
    kind = schema.get("type")
    if kind is not None:
        return bool(kind == "string")
    values = schema.get("enum")
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _as_json(text: str, kinds: Set[str]) -> str:
    """Returns a value that is not declared as text alone: as it is if it is JSON, else as a string.

    `kinds` are those that the value may have; if a string is one of them, JSON of another kind is a string, too.
    """
    value = text.strip()
    kind, word = "string", value.lower()
    try:
        kind = _KINDS[type(json.loads(value, parse_constant=_refuse_constant))]
    except (ValueError, RecursionError):
        if word in ("true", "false"):
            kind, value = "boolean", word
        elif word in ("none", "null"):
            kind, value = "null", "null"
        else:
            return json.dumps(text if "string" in kinds else value, ensure_ascii=False)
    fits = kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds
    return value if fits else json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _kinds_of(schema: Any) -> Set[str]:
    """Returns the kinds of JSON values that a schema declares, such as "string"; none if it does not name them all."""
    if not isinstance(schema, dict):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_KINDS[type(value)] for value in values}
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list):
            each = [_kinds_of(choice) for choice in choices]
            return frozenset().union(*each) if all(each) else frozenset()
    return set()


def _python_call(cursor: Cursor, writer: PartWriter) -> Reading[bool]:
    """Reads name(key=value, ...). The arguments are written at the end of the call."""
    yield from cursor.blanks()
    text = yield from _to_closing_paren(cursor, writer.limits.argument_chars)
    call = None if text is None else _parse_call(text, writer)
    if call is None:
        return False
    name, arguments = call
    writer.call(name, None)
    writer.arguments(json.dumps(arguments, ensure_ascii=False))
    return True


def _to_closing_paren(cursor: Cursor, limit: int) -> Reading[str | None]:
    parts: list[str] = []
    depth, quote, escaped = 0, "", False
    while len(parts) <= limit:
        char = yield from cursor.peek()
        if not char or (not depth and not (char == "(" or char in "._-" or char.isalnum())):
            return None
        parts.append(cursor.take(1))
        if escaped:
            escaped = False
        elif quote:
            escaped = char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if not depth:
                return "".join(parts)
    return None


def _parse_call(text: str, writer: PartWriter) -> tuple[str, dict[str, Any]] | None:
    try:
        node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call):
            return None
        name = ast.unparse(node.func)
        if name not in writer.schemas:
            return None
        properties = writer.schemas[name].get("properties")
        keys = list(properties) if isinstance(properties, dict) else []
        values = {key: _value(item) for key, item in zip(keys, node.args, strict=False)}
        values |= {item.arg: _value(item.value) for item in node.keywords if item.arg is not None}
        values = {key: _finite(value) for key, value in values.items()}
        json.dumps(values, ensure_ascii=False).encode()
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None
    return name, values


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _PYTHON_NAMES:
        return _PYTHON_NAMES[node.id]
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _value(item)
            for key, item in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | list | dict | tuple | None):
        raise ValueError("no JSON value")
    return value


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have, such as 1e999."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case list() | tuple():
            return [_finite(item) for item in value]
        case dict():
            return {key: _finite(item) for key, item in value.items()}
    return value
