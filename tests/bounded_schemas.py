"""Random schemas whose instances are short, some of them with a keyword that no grammar can hold."""

import random
from typing import Any, NamedTuple

PATTERNS = ["^[a-f]{2,5}$", r"^\d{3}-[A-Z]+\d$", "^(x|yy){1,3}$"]
VALUES: list[Any] = [1, "one", None, True, [2, "é"], {"k": 1}, 'q"\\']
UNSUPPORTED: dict[str, Any] = {
    "not": {"const": 7},
    "if": {"type": "string"},
    "uniqueItems": True,
    "contains": {"type": "null"},
    "minContains": 2,
    "propertyNames": {"maxLength": 9},
    "dependentRequired": {"a": ["name"]},
    "dependentSchemas": {"a": {"required": ["name"]}},
    "dependencies": {"a": ["name"]},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "additionalItems": False,
    "$dynamicRef": "#node",
}


class BoundedSchema(NamedTuple):
    schema: dict[str, Any]
    unsupported: str  # a keyword in it; empty: none


def bounded_schemas(count: int = 500, seed: int = 1) -> list[BoundedSchema]:
    """Every sixth has an unsupported keyword in one of its schemas."""
    source = random.Random(seed)
    made = []
    for i in range(count):
        schema, keyword = some_schema(source), ""
        if i % 6 == 5:
            keyword = source.choice(list(UNSUPPORTED))
            source.choice(_schemas(schema))[keyword] = UNSUPPORTED[keyword]
        made.append(BoundedSchema(schema, keyword))
    return made


def some_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """Strings, numbers, choices, and at the top objects and lists."""
    kinds = ["string", "pattern", "format", "integer", "number", "enum", "boolean", "anyOf", "null"]
    kind = source.choice(["object", "object", "array", *(kinds if depth else [])] if depth < 3 else kinds)
    if kind == "object":
        names = source.sample(["a", "name", "id 1", "é", "x-y", "long_name_of_a_property"], source.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: some_schema(source, depth + 1) for name in names},
            "required": [name for name in names if source.random() < 0.7],
            "additionalProperties": False,
        }
    if kind == "array":
        low = source.randint(0, 2)
        return {"type": "array", "items": some_schema(source, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [some_schema(source, depth + 1) for _ in range(source.randint(1, 3))]}
    low = source.randint(-50, 50)
    return {
        "string": lambda: {"type": "string", "minLength": source.randint(0, 3), "maxLength": source.randint(3, 12)},
        "pattern": lambda: {"type": "string", "pattern": source.choice(PATTERNS)},
        "format": lambda: {"type": "string", "format": source.choice(["email", "uuid", "ipv4"])},
        "integer": lambda: {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 5000)},
        "number": lambda: {"type": "number", "minimum": low, "exclusiveMaximum": low + 10},
        "enum": lambda: {"enum": source.sample(VALUES, source.randint(1, 5))},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": "null"},
    }[kind]()


def _schemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The schema and those within it."""
    within = [*schema.get("properties", {}).values(), *schema.get("anyOf", ())]
    if "items" in schema:
        within.append(schema["items"])
    return [schema, *(each for child in within for each in _schemas(child))]
