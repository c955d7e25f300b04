"""Compares what a server sends with a client's types: nothing may be missing, have another type, or be unknown."""

import functools
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, TypeAdapter


def unknown_fields(kind: Any, data: bytes | str) -> set[str]:
    """The places of fields that the type does not have, such as "choices.[].stop_reason". Raises pydantic's
    ValidationError for a field that is missing or has another type or an unknown value."""
    return set(_extra(_adapter(kind).validate_json(data, strict=True), ""))


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _extra(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name in value.model_extra or {}:
            yield f"{place}{name}"
        for name in type(value).model_fields:
            yield from _extra(getattr(value, name), f"{place}{name}.")
    elif isinstance(value, dict):
        for item in value.values():
            yield from _extra(item, f"{place}{{}}.")
    elif isinstance(value, list):
        for item in value:
            yield from _extra(item, f"{place}[].")
