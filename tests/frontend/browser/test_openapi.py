"""The OpenAPI document: it has every route, and its examples work."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from penstock.frontend import openapi
from penstock.frontend.http.access import ADMIN_PATHS, OPEN_PATHS
from penstock.frontend.requests.meanings import MEANINGS
from penstock.frontend.wires import WIRES
from tests.described import check_described, json_schemas
from tests.frontend.conftest import NAME, Site


async def document(site: Site) -> dict[str, Any]:
    return (await site.http.get("/openapi.json")).json()


async def test_every_route_is_in_it(site: Site) -> None:
    described = {
        (method.upper(), path) for path, methods in (await document(site))["paths"].items() for method in methods
    }
    routes = {(route.method, re.sub(r":\w+}", "}", route.path)) for wire in WIRES for route in wire.routes}
    admin = {("GET" if path == b"/is_sleeping" else "POST", path.decode()) for path in ADMIN_PATHS}
    probes = {("GET", path.decode()) for path in OPEN_PATHS}
    assert described == routes | admin | probes | {("GET", "/openapi.json"), ("POST", "/ping")}


async def test_its_references_are_whole_and_names_are_different(site: Site) -> None:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), [name for name, _ in pairs]
        return dict(pairs)

    spec = json.loads((await site.http.get("/openapi.json")).content, object_pairs_hook=once)
    schemas = spec["components"]["schemas"]
    assert {"tgi.Parameters", "kserve.Parameters"} <= schemas.keys()
    assert not any("penstock" in name for name in schemas)
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(spec)):
        assert name in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [operation["operationId"] for methods in spec["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/api/generate", "/generate"]
)
async def test_parameters_say_what_they_mean(site: Site, path: str) -> None:
    """/docs shows it. A new parameter needs a line in requests/meanings.py."""
    spec = await document(site)
    schema = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    silent = [name for name, field in fields.items() if "description" not in field and "$ref" not in field]
    assert silent == []


def test_meanings_are_those_of_parameters_that_there_are() -> None:
    spec = json.loads(openapi.document(tuple(WIRES), "m"))
    names = {name for one in spec["components"]["schemas"].values() for name in one.get("properties", {})}
    assert MEANINGS.keys() <= names


def bodies(spec: dict[str, Any]) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """(method, path, schema, example) of every route that takes a body. The paths are those of the tests' model."""
    found = []
    for path, methods in spec["paths"].items():
        for method, operation in methods.items():
            if "requestBody" in operation:
                content = operation["requestBody"]["content"].get("application/json")
                if content is None:  # a form
                    continue
                name = content["schema"]["$ref"].rpartition("/")[2]
                at = path.replace("{model}", NAME).replace("{version}", "1")
                found.append((method, at, spec["components"]["schemas"][name], content.get("example", {})))
    return found


async def test_bodies_are_described_by_what_decodes_them(site: Site) -> None:
    """Every parameter of a schema is known to its route, and no other is."""
    tried = 0
    for method, path, schema, example in bodies(await document(site)):
        strict = schema.get("additionalProperties") is False
        for parameter in (*schema["properties"], "no_such_parameter"):
            response = await site.http.request(method, path, json={**example, parameter: {"a": [{}]}})
            unknown = f"unknown parameter '{parameter}'" in response.text
            assert unknown == (strict and parameter == "no_such_parameter"), (path, parameter, response.text)
            tried += 1
    assert tried > 200


def limited(spec: dict[str, Any], schema: dict[str, Any]) -> Iterator[tuple[str, str, list[Any], list[Any]]]:
    """(parameter, its object's name or "", values at its limits, values beyond them) of what a body has."""
    for name, field in schema["properties"].items():
        within = [field[end] for end in ("minimum", "maximum") if end in field]
        beyond = [field[end] + by for end, by in (("minimum", -1), ("maximum", 1)) if end in field]
        if "minLength" in field:
            within, beyond = ["a"], [""]
        if "minItems" in field:
            within, beyond = [], [*beyond, []]
        if beyond:
            yield name, "", within, beyond
        for one in field.get("anyOf", ()):
            if name in ("options", "parameters") and "$ref" in one:
                inner = spec["components"]["schemas"][one["$ref"].rpartition("/")[2]]
                yield from ((parameter, name, *values) for parameter, _, *values in limited(spec, inner))


async def test_limits_of_parameters_are_those_that_are_checked(make_site: Callable[..., Site]) -> None:
    site, tried = make_site(max_model_len=256), 0
    spec = await document(site)
    beside: dict[tuple[str, str], dict[str, Any]] = {
        ("/v1/completions", "max_tokens"): {"echo": True},
        ("/v1/chat/completions", "max_completion_tokens"): {"max_tokens": None},
        **{
            (path, "top_logprobs"): {"logprobs": True}
            for path in ("/v1/chat/completions", "/api/chat", "/api/generate")
        },
    }
    for method, path, schema, example in bodies(spec):
        for name, outer, within, beyond in limited(spec, schema):
            used = {key: value for key, value in example.items() if key != name} | beside.get((path, name), {})
            for value in (*within, *beyond):
                given = [value] if name == "stop_sequences" or (outer, name) == ("parameters", "stop") else value
                body = {**used, **({outer: {**used.get(outer, {}), name: given}} if outer else {name: given})}
                response = await site.http.request(method, path, json=body)
                # This model generates, and this server has no repository.
                if "has no embeddings" not in response.text and "has no repository" not in response.text:
                    statuses = (200,) if value in within else (400, 422)
                    assert response.status_code in statuses, (path, outer, name, value, response.text)
                    tried += 1
    assert tried > 200


async def test_the_examples_work(make_site: Callable[..., Site]) -> None:
    site, tried = make_site(max_model_len=256), 0
    for method, path, _, example in bodies(await document(site)):
        if example:
            response = await site.http.request(method, path, json=example)
            # This model generates, and this server stores nothing and has no repository.
            reasons = ("has no embeddings", "storage_disabled", "has no repository")
            refused = any(reason in response.text for reason in reasons)
            assert response.status_code == 200 or refused, (path, response.text)
            tried += 1
    assert tried > 10


def test_every_answer_that_is_json_is_described() -> None:
    """That answers match is checked with every answer of the tests' client."""
    bare = [f"{method} {path}" for method, path, schema in json_schemas() if not schema]
    assert bare == ["post /v1/responses/{id}/cancel"]  # always an error


async def test_answers_that_do_not_match_are_found(site: Site) -> None:
    """In each answer here, another name and a missing one are errors."""
    paths = ("/v1/models", "/v1/models/tiny", "/info", "/v2", "/v2/models/tiny/config", "/api/tags", "/server_info")
    for path in paths:
        response = await site.http.get(path)
        fields = response.json()
        missing = {name: value for name, value in fields.items() if name != next(iter(fields))}
        for wrong in ({**fields, "other": 1}, missing):
            changed = httpx.Response(200, json=wrong, request=response.request)
            with pytest.raises(jsonschema.ValidationError):
                check_described(changed)
