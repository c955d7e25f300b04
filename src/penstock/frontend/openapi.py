"""GET /openapi.json: describes every route. Schemas of bodies are made from the types that decode them, schemas of
answers from the shapes in each wire's `answers.py`."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
import orjson

from penstock.frontend.describe import Operation, json_schema
from penstock.frontend.errors import APIError
from penstock.frontend.requests.meanings import MEANINGS
from penstock.frontend.requests.ranges import KEYWORDS
from penstock.frontend.wires import BATCHES, OPENAI, RESPONSES, Wire, WireRoute
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
_ASLEEP = {"is_sleeping": bool}
_ADMIN: dict[str, tuple[str, str, Any]] = {
    "/reload": (
        "post",
        "Load the model and its settings again; with drain_first=true, end the old engine first",
        {"message": str},
    ),
    "/sleep": ("post", "End the engine until a request comes", _ASLEEP),
    "/wake_up": ("post", "Start the engine", _ASLEEP),
    "/reset_prefix_cache": ("post", "Empty the prefix cache, and delete the disk tier's files", {"reset": bool}),
    "/is_sleeping": ("get", "Whether the engine is asleep", _ASLEEP),
}
_MAYBE = (str, None)
_PROBED = {"/version": {"version": str}, "/metrics": Any, "/openapi.json": {str: Any}}  # the other probes have a status
# Errors of the wires, by their names. OpenAI's are those of all other routes. A message names the value, the limit and
# what to change.
_OPENAI, _PLAIN = "OpenAIError", "PlainError"
_ERRORS = {
    _OPENAI: {"error": {"message": str, "type": str, "param": _MAYBE, "code": _MAYBE}},
    "AnthropicError": {"type": "error", "error": {"type": str, "message": str}},
    _PLAIN: {"error": str},
    "TGIError": {"error": str, "error_type": str},
    "RerankError": {"message": str, "detail": str, "error": {"message": str, "param": _MAYBE, "code": _MAYBE}},
}
_ERROR_OF = {
    "anthropic": "AnthropicError",
    "ollama": _PLAIN,
    "tgi": "TGIError",
    "kserve": _PLAIN,
    "rerank": "RerankError",
}
# Statuses of errors before a wire gives them its own, each with its reason.
_ANY_ROUTE = {
    400: "The request is wrong",
    401: "No valid key",
    403: "Not allowed",
    404: "The model or what the path names is not there",
    405: "The path does not take this method",
    429: "Too many requests: try again later",
    431: "The request line or the headers are too long",
    500: "The server's error",
    503: "The server cannot serve now",
}
_WITH_BODY = {
    408: "The body did not arrive in time",
    413: "The body is too large",
    415: "The body has the wrong content type",
    504: "The deadline has passed",
}
_STORED = {409: "What is stored does not allow it", 507: "The storage is full"}


@cache
def document(wires: tuple[Wire, ...], model: str) -> bytes:
    """Returns the document of a server with these wires and a model of this name, as JSON."""
    described = [(wire, route, _operation(wire, route)) for wire in wires for route in wire.routes]
    requests = {operation.request for _, _, operation in described if operation.request is not None}
    types = sorted(requests, key=lambda request: request.__name__)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    for component in components.values():  # add ranges and meanings; what a struct itself declares has precedence
        for name, field in component.get("properties", {}).items():
            meaning = {"description": MEANINGS[name]} if name in MEANINGS else {}
            field.update({**KEYWORDS.get(name, {}), **meaning, **field})
    paths: dict[str, dict[str, Any]] = {}
    answers = {
        _answer_name(wire, route): json_schema(operation.shape)
        for wire, route, operation in described
        if operation.shape is not Any
    }
    for wire, route, operation in described:
        path = re.sub(r":\w+}", "}", route.path)
        # If several wires have a path, the first one's route is described. Clients select the others by a header.
        fields = _fields(wire, route, operation, schema_of, model)
        first = paths.setdefault(path, {}).setdefault(route.method.lower(), fields)
        if first is not fields:
            _add_answers(first["responses"]["200"]["content"], fields["responses"]["200"].get("content", {}))
    _add_own(paths)
    text = orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {"title": "Penstock", "version": __version__, "description": "LLM inference server"},
            "paths": paths,
            "security": [{"key": []}, {}],
            "components": {
                "schemas": {
                    **{name: dict(schema) for name, schema in components.items()},
                    **answers,
                    **{name: json_schema(shape) for name, shape in _ERRORS.items()},
                },
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer", "description": "Needed if the server has an API key"},
                    "admin": {"type": "http", "scheme": "bearer", "description": "The server's admin key"},
                },
            },
        }
    )
    # Structs of several wires may have one name. msgspec then adds their modules, which are shortened to the wire's
    # name here: tgi.Parameters and kserve.Parameters.
    return re.sub(rb"penstock\.frontend\.(\w+)\.\w+\.", rb"\1.", text)


def _add_own(paths: dict[str, dict[str, Any]]) -> None:
    """Adds the routes that belong to no wire: probes, and the operator's."""
    for path, summary in _PROBES.items():
        kind = "text/plain" if path == "/metrics" else "application/json"
        content = {kind: {"schema": json_schema(_PROBED.get(path, {"status": str}))}}
        responses = {"200": {"description": summary, "content": content}}
        if summary.startswith("200 "):
            responses["503"] = {"description": "The server cannot serve now", "content": content}
        for method in ("get", "post") if path == "/ping" else ("get",):
            paths.setdefault(path, {})[method] = {
                "tags": ["probes"],
                "summary": summary,
                "operationId": path[1:] if method == "get" else f"{path[1:]}.{method}",
                "security": [],
                "responses": responses,
            }
    for path, (method, summary, shape) in _ADMIN.items():
        paths[path] = {
            method: {
                "tags": ["operator"],
                "summary": summary,
                "operationId": path[1:],
                "security": [{"admin": []}, {}],
                "responses": {
                    "200": {"description": summary, "content": {"application/json": {"schema": json_schema(shape)}}},
                    **_failures(OPENAI, _ANY_ROUTE | {409: "Another one is in progress", 422: "It failed"}),
                },
                **({"parameters": [_in_query("drain_first", {"type": "boolean"})]} if path == "/reload" else {}),
            }
        }


def _operation(wire: Wire, route: WireRoute) -> Operation:
    described: Mapping[str, Operation] = getattr(wire.package, "OPERATIONS", {})
    if route.function in described:
        return described[route.function]
    first = (getattr(wire.package, route.function).__doc__ or route.function).strip().splitlines()[0]
    return Operation(summary=first.rstrip("."))


def _fields(
    wire: Wire, route: WireRoute, operation: Operation, schema_of: Mapping[type[msgspec.Struct], Any], model: str
) -> dict[str, Any]:
    types = [kind for kind in (operation.answer, operation.stream) if kind is not None]
    answer: dict[str, Any] = {"description": "The answer"}
    if types:
        answer["content"] = {kind: {} for kind in types}
    if operation.shape is not Any:
        answer["content"]["application/json"] = {"schema": _reference(_answer_name(wire, route))}
    statuses = _ANY_ROUTE if route.method == "GET" else _ANY_ROUTE | _WITH_BODY
    if wire in (RESPONSES, BATCHES):
        statuses = statuses | _STORED
    if route.kind == "socket":
        statuses = statuses | {426: "The request opens no WebSocket"}
    fields: dict[str, Any] = {
        "tags": [wire.name],
        "summary": operation.summary,
        "operationId": _id(wire, route),
        "responses": {
            **({"101": {"description": "A WebSocket"}} if route.kind == "socket" else {"200": answer}),
            **_failures(wire, statuses),
        },
    }
    if route.public:
        fields["security"] = []
        fields["responses"]["304"] = {"description": "The browser has it"}
    if "{" in route.path and wire.name in _ERROR_OF:  # a path with a line feed is no route's, whose errors are OpenAI's
        missing = fields["responses"]["404"]["content"]["application/json"]
        missing["schema"] = {"anyOf": [missing["schema"], _reference(_OPENAI)]}
    in_query = [_in_query(name, schema) for name, schema in operation.query.items()]
    if parameters := [*_parameters(route.path), *in_query]:
        fields["parameters"] = parameters
    if operation.form:
        fields["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    if operation.request is not None:
        content: dict[str, Any] = {"schema": schema_of[operation.request]}
        if operation.example:
            named = {"model": model} if "model" in operation.request.__struct_fields__ else {}
            content["example"] = {**named, **operation.example}
        fields["requestBody"] = {"required": True, "content": {"application/json": content}}
    return fields


def _failures(wire: Wire, statuses: Mapping[int, str]) -> dict[str, Any]:
    """The errors of a route, with the statuses and the schema of its wire."""
    schema = _reference(_ERROR_OF.get(wire.name, _OPENAI))
    found = {wire.encode_error(APIError(status, "")).status: text for status, text in statuses.items()}
    return {
        str(status): {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in sorted(found.items())
    }


def _add_answers(content: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Adds the answers of another wire with the same path to `content`: a schema for each content type."""
    for kind, one in more.items():
        first = content.setdefault(kind, one)
        if first is not one and "schema" in first:
            first["schema"] = {"anyOf": [first["schema"], one["schema"]]}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _in_query(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


def _id(wire: Wire, route: WireRoute) -> str:
    """A name that no other route has: a function may have several paths."""
    first = next(other for other in wire.routes if other.function == route.function)
    return f"{wire.name}.{route.function}" + ("" if route is first else route.path.replace("/", "."))


def _answer_name(wire: Wire, route: WireRoute) -> str:
    return f"{wire.name}.{route.function}.answer"


def _parameters(path: str) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)", path):
        schema = {"const": "1"} if f"/versions/{{{name}" in path else {"type": "string"}  # a model's only version
        yield {"name": name, "in": "path", "required": True, "schema": schema}
