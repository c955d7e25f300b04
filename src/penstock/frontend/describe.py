"""How a wire describes its routes for the OpenAPI document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

import msgspec

from penstock.messages import GivenSampling

T = TypeVar("T", bound=msgspec.Struct)

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", None: "null"}

# Annotates a text or a list that must not be empty. This is for the document alone: the route's function checks it.
NOT_EMPTY = msgspec.Meta(extra_json_schema={"minLength": 1, "minItems": 1})


def unsupported(*harmless: Any) -> msgspec.Meta:
    """Returns the annotation of an API's parameter that Penstock does not support. `harmless` are the values that have
    no effect, which are accepted, as null is. `refuse_unsupported` (http/body.py) refuses the others."""
    schema = {"description": "Not supported: leave it out", "enum": [None, *harmless]}
    return msgspec.Meta(extra_json_schema=schema, extra={"harmless": harmless})


def with_sampling(kind: type[T]) -> type[T]:
    """Returns the struct with the fields of GivenSampling, for one that cannot inherit them as it has another base."""
    struct = msgspec.defstruct(
        kind.__name__,
        [(name, annotation, None) for name, annotation in GivenSampling.__annotations__.items()],
        bases=(kind,),
        module=kind.__module__,
        namespace={"__doc__": kind.__doc__},
        kw_only=True,
        forbid_unknown_fields=True,
    )
    return cast(type[T], struct)


@cache
def unsupported_fields(kind: type[msgspec.Struct]) -> Mapping[str, tuple[Any, ...]]:
    """Returns the fields of a struct that are declared `unsupported`, each with its harmless values."""
    return {
        name: meta.extra["harmless"]
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for meta in getattr(hint, "__metadata__", ())
        if isinstance(meta, msgspec.Meta) and meta.extra is not None and "harmless" in meta.extra
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Describes one route. A wire's package has `OPERATIONS`, a mapping from the names of its functions to these."""

    summary: str
    request: type[msgspec.Struct] | None = None  # what the body is decoded as
    form: Mapping[str, Any] = field(default_factory=dict)  # JSON Schema of a body that is multipart/form-data
    example: Mapping[str, Any] = field(default_factory=dict)  # a body, without the model's name
    query: Mapping[str, Any] = field(default_factory=dict)  # JSON Schemas of the query's parameters, by name
    answer: str | None = "application/json"  # content type; None: the answer has no body
    shape: Any = Any  # of an answer that is JSON (see `json_schema`); Any: it has no schema
    stream: str | None = None  # content type of the answer if the request has "stream": true


def json_schema(shape: Any) -> dict[str, Any]:
    """Returns the JSON Schema of a shape.

    | shape | values |
    |---|---|
    | `str`, `int`, `float`, `bool`, `None`, `Any` | of that type |
    | `"a text"` | this text |
    | `(a, b)` | of one of these shapes |
    | `[a]` | a list, whose items have this shape |
    | `{"name": a, "other?": b}` | an object with these fields and no others; `other` may be missing |
    | `{str: a}` | an object with any names, whose values have this shape |
    """
    if shape is Any:
        return {}
    if isinstance(shape, str):
        return {"const": shape}
    if isinstance(shape, tuple):
        return {"anyOf": [json_schema(one) for one in shape]}
    if isinstance(shape, list):
        return {"type": "array", "items": json_schema(shape[0])}
    if not isinstance(shape, dict):
        return {"type": _TYPES[shape]}
    if str in shape:
        return {"type": "object", "additionalProperties": json_schema(shape[str])}
    return {
        "type": "object",
        "properties": {name.rstrip("?"): json_schema(one) for name, one in shape.items()},
        "required": [name for name in shape if not name.endswith("?")],
        "additionalProperties": False,
    }
