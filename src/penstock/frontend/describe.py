"""How a wire describes its routes for the OpenAPI document."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Describes one route. A wire's package has `OPERATIONS`, a mapping from the names of its functions to these."""

    summary: str
    request: type[msgspec.Struct] | None = None  # what the body is decoded as
    form: Mapping[str, Any] = field(default_factory=dict)  # JSON Schema of a body that is multipart/form-data
    example: Mapping[str, Any] = field(default_factory=dict)  # a body, without the model's name
    query: Mapping[str, Any] = field(default_factory=dict)  # JSON Schemas of the query's parameters, by name
    answer: str | None = "application/json"  # content type; None: the answer has no body
    stream: str | None = None  # content type of the answer if the request has "stream": true
