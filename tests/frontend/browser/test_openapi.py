"""The OpenAPI document: it has every route, and its examples work."""

import json
import re
from typing import Any

import jsonschema

from penstock.frontend.http.access import OPEN_PATHS
from penstock.frontend.wires import WIRES
from tests.frontend.conftest import Site


async def document(site: Site) -> dict[str, Any]:
    return (await site.http.get("/openapi.json")).json()


async def test_every_route_is_in_it(site: Site) -> None:
    described = {
        (method.upper(), path) for path, methods in (await document(site))["paths"].items() for method in methods
    }
    routes = {(route.method, re.sub(r":\w+}", "}", route.path)) for wire in WIRES for route in wire.routes}
    assert described == routes | {("GET", path.decode()) for path in OPEN_PATHS} | {("GET", "/openapi.json")}


async def test_its_references_are_whole_and_names_are_different(site: Site) -> None:
    spec = await document(site)
    schemas = spec["components"]["schemas"]
    for name in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(spec)):
        assert name in schemas
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    ids = [operation["operationId"] for methods in spec["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))


async def test_bodies_are_described_by_what_decodes_them(site: Site) -> None:
    """Every parameter of a schema is known to its route, and no other is."""
    spec = await document(site)
    tried = 0
    for path, methods in spec["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json")
        if content is None:
            continue
        name = content["schema"]["$ref"].rpartition("/")[2]
        schema = spec["components"]["schemas"][name]
        for parameter in (*schema["properties"], "no_such_parameter"):
            body = {**content.get("example", {}), parameter: {"a": [{}]}}
            answer = (await site.http.post(path, json=body)).text
            unknown = f"unknown parameter '{parameter}'" in answer
            assert unknown == (parameter == "no_such_parameter"), (path, parameter, answer)
            tried += 1
    assert tried > 100


async def test_the_examples_work(site: Site) -> None:
    spec = await document(site)
    for path, methods in spec["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json", {})
        if example := content.get("example"):
            fits = {**example, "max_tokens": 8} if "max_tokens" in example else example
            response = await site.http.post(path, json=fits)
            assert response.status_code == 200, (path, response.text)
