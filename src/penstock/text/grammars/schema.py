"""Checks a JSON schema before llguidance reads it.

llguidance holds most keywords exactly. The others are refused here by name, so that no output ever breaks a keyword of
its schema. docs/structured-output.md has the table.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

MAX_BYTES = 64 << 10  # of a schema, a regular expression or a grammar
MAX_DEPTH = 64  # objects and lists within each other; llguidance stops at 128
MAX_VALUES = 10_000  # objects, lists and plain values

# Formats that llguidance holds. Any other is a remark to the reader, as JSON Schema defines: it is left out.
FORMATS = frozenset(("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"))
REFUSED = frozenset(
    (
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties"),
        *("additionalItems", "$dynamicRef", "$recursiveRef", "x-guidance"),
    )
)
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "additionalItems": (True,),
    "unevaluatedItems": (True,),
    "unevaluatedProperties": (True,),
    "propertyNames": (True, {}),
}
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_SCHEMAS = ("additionalProperties", "items")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class GrammarError(ValueError):
    """A grammar is invalid, too large or too slow, or needs something that cannot be held. The message is for users."""


def read_schema(text: str) -> str:
    """Returns a JSON schema as llguidance is to read it. Raises GrammarError that names the keyword and its place."""
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from None
    _check_size(schema)
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"the schema is {_kind(schema)}; it must be an object")
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return json.dumps(_read(schema, ""), ensure_ascii=False)


def _read(schema: Any, where: str) -> Any:
    """The schema without what only informs the reader."""
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise GrammarError(f"{where or 'the schema'} is {_kind(schema)}; it must be an object or a boolean")
    kept = {}
    for key, value in schema.items():
        place = f"{where}/{key}"[:200]
        if key in REFUSED:
            if value in _HARMLESS.get(key, ()):
                continue
            raise GrammarError(f"the keyword {key!r} at {place} is not supported; leave it out")
        if key == "format" and not (isinstance(value, str) and value in FORMATS):
            continue
        if key == "items" and isinstance(value, list):
            raise GrammarError(f"{place} is a list; use the keyword 'prefixItems' for the items of a tuple")
        if key == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            raise GrammarError(f"the keyword '$ref' at {place} must point into the schema itself, such as #/$defs/name")
        kept[key] = _read_value(key, value, place)
    return kept


def _read_value(key: str, value: Any, place: str) -> Any:
    if key in _SCHEMAS:
        return _read(value, place)
    if key in _LISTS:
        if not isinstance(value, list):
            raise GrammarError(f"{place} is {_kind(value)}; it must be a list of schemas")
        return [_read(each, f"{place}/{i}") for i, each in enumerate(value)]
    if key in _MAPS:
        if not isinstance(value, dict):
            raise GrammarError(f"{place} is {_kind(value)}; it must be an object of schemas")
        return {name: _read(each, f"{place}/{name}"[:200]) for name, each in value.items()}
    if key == "type":
        for name in value if isinstance(value, list) else [value]:
            if name not in TYPES:
                shown = repr(name[:40]) if isinstance(name, str) else _kind(name)
                raise GrammarError(f"the type at {place} is {shown}; it must be one of {', '.join(TYPES)}")
    _check_value(key, value, place)
    return int(value) if key in _COUNTS else value  # llguidance does not read 2.0 here, which is the same number


def _check_value(key: str, value: Any, place: str) -> None:
    """Raises GrammarError for a plain value of a wrong type."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    number = whole or (isinstance(value, float) and math.isfinite(value))
    if key in _COUNTS and not (number and value >= 0 and (whole or value.is_integer())):
        raise GrammarError(f"{place} is {_shown(value)}; it must be a whole number, 0 or more")
    if key in _NUMBERS and not (number and (key != "multipleOf" or value > 0)):
        raise GrammarError(f"{place} is {_shown(value)}; it must be a number{' above 0' * (key == 'multipleOf')}")
    if key == "enum" and not isinstance(value, list):
        raise GrammarError(f"{place} is {_kind(value)}; it must be a list of values")
    if key == "pattern" and not isinstance(value, str):
        raise GrammarError(f"{place} is {_kind(value)}; it must be a string")
    if key == "required":
        if not isinstance(value, list):
            raise GrammarError(f"{place} is {_kind(value)}; it must be a list of names")
        for i, name in enumerate(value):
            if not isinstance(name, str):
                raise GrammarError(f"{place}/{i} is {_kind(name)}; it must be a string")


def _shown(value: Any) -> str:
    return str(value)[:40] if isinstance(value, int | float) and not isinstance(value, bool) else _kind(value)


def _check_size(schema: Any) -> None:
    values = 0
    level = [schema]
    for _ in range(MAX_DEPTH + 1):
        values += len(level)
        if values > MAX_VALUES:
            raise GrammarError(f"the schema has more than {MAX_VALUES} values; split it or leave details out")
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise GrammarError(f"the schema is nested more than {MAX_DEPTH} levels deep; flatten it, or use $ref")


def _children(value: Any) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")
