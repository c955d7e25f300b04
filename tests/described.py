"""Holds answers against the OpenAPI document: what a server answers is what the document says."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import jsonschema
import orjson
from starlette.routing import compile_path

from penstock.frontend.openapi import document
from penstock.frontend.wires import WIRES

FEW = 16  # items at the beginning and at the end of an array that are checked

_SPEC = orjson.loads(document(WIRES, "model"))
_PATTERNS = [(compile_path(path)[0], path) for path in dict.fromkeys(r.path for wire in WIRES for r in wire.routes)]


def check_described(response: httpx.Response) -> None:
    """Raises ValidationError unless the document allows this answer. Only JSON with the status 200 is checked."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    path = described_path(response.url.path)
    if response.status_code == 200 and kind == "application/json" and response.content and path:
        _validator(path, response.request.method.lower()).validate(_with_short_arrays(orjson.loads(response.content)))


def _with_short_arrays(value: Any) -> Any:
    """The value with the first and last items of long arrays only. A vector has hundreds of numbers, and jsonschema
    takes 10 us for each."""
    match value:
        case list():
            items = value if len(value) <= 2 * FEW else value[:FEW] + value[-FEW:]
            return [_with_short_arrays(item) for item in items]
        case dict():
            return {name: _with_short_arrays(item) for name, item in value.items()}
    return value


def described_path(path: str) -> str:
    """The document's name of a path, "" for one that it does not have."""
    found = next((template for pattern, template in _PATTERNS if pattern.match(path)), path)
    shown = found.replace(":path", "")
    return shown if shown in _SPEC["paths"] else ""


def json_schemas() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, schema) of each answer that is JSON."""
    for path, methods in _SPEC["paths"].items():
        for method, operation in methods.items():
            content = operation["responses"].get("200", {}).get("content", {})
            if "application/json" in content:
                yield method, path, content["application/json"].get("schema", {})


@cache
def _validator(path: str, method: str) -> jsonschema.Draft202012Validator:
    schema = _SPEC["paths"][path][method]["responses"]["200"]["content"]["application/json"]["schema"]
    return jsonschema.Draft202012Validator({**schema, "components": _SPEC["components"]})
