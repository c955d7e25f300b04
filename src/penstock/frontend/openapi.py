"""GET /openapi.json: describes every route. Schemas of bodies are made from the types that decode them."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
import orjson

from penstock.frontend.describe import Operation
from penstock.frontend.wires import Wire, WireRoute
from penstock.version import __version__

_PROBES = {
    "/livez": "200 unless the engine has ended for good",
    "/readyz": "200 while new requests are accepted",
    "/health": "200 while new requests are accepted",
    "/ping": "200 while new requests are accepted",
    "/v2/health/live": "200 unless the engine has ended for good",
    "/v2/health/ready": "200 while new requests are accepted",
    "/version": "The server's version",
    "/metrics": "Metrics for Prometheus",
    "/openapi.json": "This document",
}
_ADMIN = {
    "/reload": ("post", "Load the model and its settings again; with drain_first=true, end the old engine first"),
    "/sleep": ("post", "End the engine until a request comes"),
    "/wake_up": ("post", "Start the engine"),
    "/is_sleeping": ("get", "Whether the engine is asleep"),
}
_ERROR = {
    "type": "object",
    "description": "An error. Its message names the value, the limit and what to change.",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_FAILED = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}


@cache
def document(wires: tuple[Wire, ...], model: str) -> bytes:
    """Returns the document of a server with these wires and a model of this name, as JSON."""
    described = [
        (wire, route, _operation(wire, route)) for wire in wires for route in wire.routes if route.kind != "socket"
    ]  # OpenAPI does not describe WebSockets
    requests = {operation.request for _, _, operation in described if operation.request is not None}
    types = sorted(requests, key=lambda request: request.__name__)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for wire, route, operation in described:
        path = re.sub(r":\w+}", "}", route.path)
        # If several wires have a path, the first one's route is described. Clients select the others by a header.
        paths.setdefault(path, {}).setdefault(route.method.lower(), _fields(wire, route, operation, schema_of, model))
    for path, summary in _PROBES.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        answers = {"200": {"description": summary, "content": {kind: {}}}}
        if summary.startswith("200 "):
            answers["503"] = {"description": "The server cannot serve now", "content": {kind: {}}}
        paths[path] = {
            "get": {
                "tags": ["probes"],
                "summary": summary,
                "operationId": path[1:],
                "security": [],
                "responses": answers,
            }
        }
    for path, (method, summary) in _ADMIN.items():
        paths[path] = {
            method: {
                "tags": ["operator"],
                "summary": summary,
                "operationId": path[1:],
                "security": [{"admin": []}, {}],
                "responses": {"200": {"description": summary, "content": {"application/json": {}}}, "default": _FAILED},
            }
        }
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "Penstock", "version": __version__, "description": "LLM inference server"},
            "paths": paths,
            "security": [{"key": []}, {}],
            "components": {
                "schemas": {**{name: dict(schema) for name, schema in components.items()}, "Error": _ERROR},
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer", "description": "Needed if the server has an API key"},
                    "admin": {"type": "http", "scheme": "bearer", "description": "The server's admin key"},
                },
            },
        }
    )


def _operation(wire: Wire, route: WireRoute) -> Operation:
    described: Mapping[str, Operation] = getattr(wire.package, "OPERATIONS", {})
    if route.function in described:
        return described[route.function]
    first = (getattr(wire.package, route.function).__doc__ or route.function).strip().splitlines()[0]
    return Operation(summary=first.rstrip("."))


def _fields(
    wire: Wire, route: WireRoute, operation: Operation, schema_of: Mapping[type[msgspec.Struct], Any], model: str
) -> dict[str, Any]:
    answer: dict[str, Any] = {operation.answer: {}}
    if operation.stream is not None:
        answer[operation.stream] = {}
    fields: dict[str, Any] = {
        "tags": [wire.name],
        "summary": operation.summary,
        "operationId": _id(wire, route),
        "responses": {
            "200": {"description": "The answer", "content": answer},
            "default": _FAILED,
        },
    }
    if route.public:
        fields["security"] = []
        fields["responses"]["304"] = {"description": "The browser has it"}
    if parameters := list(_parameters(route.path)):
        fields["parameters"] = parameters
    if operation.request is not None:
        content: dict[str, Any] = {"schema": schema_of[operation.request]}
        if operation.example:
            named = {"model": model} if "model" in operation.request.__struct_fields__ else {}
            content["example"] = {**named, **operation.example}
        fields["requestBody"] = {"required": True, "content": {"application/json": content}}
    return fields


def _id(wire: Wire, route: WireRoute) -> str:
    """A name that no other route has: a function may have several paths."""
    first = next(other for other in wire.routes if other.function == route.function)
    return f"{wire.name}.{route.function}" + ("" if route is first else route.path.replace("/", "."))


def _parameters(path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)", path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
