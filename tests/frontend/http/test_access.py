"""Who comes in: keys, host names, routes, limits of the whole server; and what every answer carries."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import pytest

from penstock.frontend.errors import APIError
from penstock.frontend.wires import WIRES, Wire, WireRoute
from tests.frontend.conftest import NAME, Site
from tests.patience import PATIENCE, until

OPEN = ["/livez", "/readyz", "/health", "/ping", "/version", "/metrics"]
KEYED = ["/v1/models", "/v1/models/tiny", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
ASK = {"prompt": "hello", "max_tokens": 2}


async def raw(site: Site, path: bytes, method: str = "GET", headers: list[tuple[bytes, bytes]] | None = None) -> int:
    """The status of a request whose path is sent byte by byte as given."""
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {
        "type": "http",
        "method": method,
        "path": unquote(path.decode()),
        "raw_path": path,
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), *(headers or [])],
    }
    await site.app(scope, receive, send)
    return status


async def test_health_version_and_metrics_are_open(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    for path in OPEN:
        response = await site.http.get(path)
        assert response.status_code == 200, path
    assert (await site.http.get("/version")).json()["version"]


@pytest.mark.parametrize(
    "key", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic secret", "secret", "Bearer secret2"]
)
async def test_everything_else_asks_for_the_key(make_site: Callable[..., Site], key: str | None) -> None:
    site = make_site(api_key="secret")
    headers = {} if key is None else {"authorization": key}
    for path in KEYED:
        for method in ("GET", "POST", "PUT", "OPTIONS"):
            response = await site.http.request(method, path, headers=headers)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    assert site.engine.requests == []


async def test_the_key_opens_and_separates_the_prefix_cache(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    headers = {"authorization": "bearer secret"}
    for salt in ({}, {"cache_salt": "mine"}):
        response = await site.http.post("/v1/completions", json={**ASK, **salt}, headers=headers)
        assert response.status_code == 200
    first, second = site.engine.requests
    assert first.tenant == second.tenant != ""
    assert "secret" not in first.tenant + first.cache_salt
    assert first.cache_salt.startswith(first.tenant)
    assert second.cache_salt == first.cache_salt + "mine"


@pytest.mark.parametrize(
    "path",
    [
        *(b"//v1/models", b"/livez/../v1/models", b"/livez/", b"/livez%2f..%2fv1/models", b"/%6civez", b"/LIVEZ"),
        *(b"/v1/models/", b"/v1%2fmodels", b"/V1/models", b"/livez;x", b"/livez%00", b"/health/v1/models", b"", b"*"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_odd_paths_are_denied_by_default(make_site: Callable[..., Site], path: bytes, method: str) -> None:
    site = make_site(api_key="secret")
    assert await raw(site, path, method) == 401
    assert await raw(site, path, method, [(b"authorization", b"Bearer secret")]) in (200, 404, 405)


WRONG = [(), ((b"authorization", b"Bearer wrong"),), ((b"x-api-key", b"wrong"),), ((b"x-api-key", b""),)]
ODD = [
    lambda path: b"/" + path,
    lambda path: path + b"/",
    lambda path: b"/." + path,
    lambda path: b"/livez/.." + path,
    lambda path: b"/dashboard/.." + path,
    lambda path: path + b";x",
    lambda path: path + b"%00",
    lambda path: path.upper(),
    lambda path: path[:-1] + b"%%%02x" % path[-1],
    lambda path: path[:1] + path[1:].replace(b"/", b"%2f"),
]
HTML = (b"accept", b"text/html")


def routes() -> list[tuple[WireRoute, bytes]]:
    """Every route of every wire, with a path that it takes."""
    found = [(route, re.sub(r"{[^}]+}", NAME, route.path).encode()) for wire in WIRES for route in wire.routes]
    return [*found, (WireRoute("GET", "/openapi.json", "answer", ""), b"/openapi.json")]


async def test_no_route_answers_without_the_key_but_pages(make_site: Callable[..., Site]) -> None:
    """Walks the table of routes, so that it has those of tomorrow, too."""
    site = make_site(api_key="secret")
    public = {path for route, path in routes() if route.public}
    for route, path in routes():
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
            page = path in public and method in ("GET", "HEAD")
            for headers in WRONG:
                status = await raw(site, path, method, [HTML, *headers])
                assert status == 401 if not page else status in (200, 404), (method, path)
            for key in ((b"authorization", b"Bearer secret"), (b"x-api-key", b"secret")):
                assert await raw(site, path, method, [HTML, key]) != 401, (method, path)
        for spell in ODD:
            if (odd := spell(path)) != path:
                for method in (route.method, "HEAD", "OPTIONS"):
                    assert await raw(site, odd, method, [HTML]) == 401, (method, odd)
    assert site.engine.requests == []


async def test_a_page_has_no_body(make_site: Callable[..., Site]) -> None:
    """A client without the key cannot fill the budget of bodies."""
    site = make_site(api_key="secret", max_body_bytes=1024)
    for headers in ({"content-type": "application/json"}, {}):
        response = await site.http.request("GET", "/dashboard", content=b"[" * 4096, headers=headers)
        assert response.status_code == 200


async def test_without_pages_no_path_is_one(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret", wires=("openai",))
    for path in (b"", b"/", b"/dashboard"):
        assert await raw(site, path) == 401


async def test_no_cache_keeps_an_answer(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    for path in ("/v1/models", "/server_info", "/nowhere", "/health"):
        response = await site.http.get(path, headers={"x-api-key": "secret"})
        assert response.headers.get_list("cache-control") == ["no-store"], path


def shape(answer: bytes) -> set[str]:
    return set(json.loads(answer))


async def test_errors_have_the_shape_of_their_wire(make_site: Callable[..., Site]) -> None:
    """Also those that come before the wire reads the request."""
    site, open_site = make_site(api_key="secret", max_body_bytes=1024), make_site()
    key = {"x-api-key": "secret", "content-type": "application/json"}
    paths = Counter(path for path, _ in {(path, wire.name) for wire in WIRES for _, path in paths_of(wire)})
    for wire in WIRES:
        wanted = shape(wire.package.encode_error(APIError(404, "x")).body)
        for route, path in paths_of(wire):
            if route.public or paths[path] > 1:
                continue
            answers = [
                await site.http.request(route.method, path),
                await site.http.request("PATCH", path, headers=key),
                await open_site.http.request(route.method, path, headers={"host": "evil.test"}),
                await open_site.http.request(route.method, path, headers={"origin": "http://evil.test"}),
            ]
            statuses = [401, 405, 403, 403]
            if route.method == "POST" and route.kind != "upload":  # a file may be large, and is a form
                answers.append(await site.http.post(path, content=b"[" * 4096, headers=key))
                answers.append(await site.http.post(path, content=b"{}", headers={**key, "content-encoding": "gzip"}))
                statuses += [413, 415]
            site.app.lifecycle.draining = True
            answers.append(await site.http.request(route.method, path, headers=key))
            site.app.lifecycle.draining = False
            statuses.append({"anthropic": 529, "tgi": 429}.get(wire.name, 503))
            assert [answer.status_code for answer in answers] == statuses, path
            for answer in answers:
                assert shape(answer.content) == wanted, path


def paths_of(wire: Wire) -> list[tuple[WireRoute, str]]:
    return [(route, re.sub(r"{[^}]+}", NAME, route.path)) for route in wire.routes]


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        *((b"127.0.0.1", True), (b"localhost:8000", True), (b"LOCALHOST", True), (b"[::1]:80", True), (b"::1", False)),
        *((b"evil.example", False), (b"127.0.0.1.evil.example", False), (b"", False), (b"localhost:x", False)),
    ],
)
async def test_on_loopback_without_a_key_only_its_names_are_answered(site: Site, host: bytes, allowed: bool) -> None:
    response = await site.http.get("/v1/models", headers={b"host": host})
    assert response.status_code == (200 if allowed else 403)
    assert (await site.http.get("/health", headers={b"host": host})).status_code == 200


@pytest.mark.parametrize("config", [{"host": "0.0.0.0"}, {"api_key": "secret"}])
async def test_elsewhere_any_name_will_do(make_site: Callable[..., Site], config: dict[str, str]) -> None:
    site = make_site(**config)
    headers = {"host": "models.example", "authorization": "Bearer secret"}
    assert (await site.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("given", ["abc-123", "req_1/2:3=+."])
async def test_a_sane_request_id_is_echoed(site: Site, given: str) -> None:
    for path in ("/v1/models", "/nowhere", "/health"):
        response = await site.http.get(path, headers={"x-request-id": given})
        assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", [b"", b"a b", b"x" * 200, "ü".encode(), b'"quoted"'])
async def test_another_request_id_is_replaced(site: Site, given: bytes) -> None:
    response = await site.http.post("/v1/completions", json=ASK, headers={b"x-request-id": given})
    assert len(response.headers["x-request-id"]) == 32


async def test_routes_that_are_not_there(site: Site) -> None:
    for method, path, status in [
        ("GET", "/api", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/images", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("PUT", "/health", 405),
        ("POST", "/v1/completions/", 404),
    ]:
        response = await site.http.request(method, path)
        assert response.status_code == status, path
        error = response.json()["error"]
        assert isinstance(error, str) if path == "/api" else error.keys() == {"message", "type", "param", "code"}
        assert ("allow" in response.headers) is (status == 405)


async def test_models(make_site: Callable[..., Site]) -> None:
    site = make_site(aliases=("org/tiny",))
    listed = (await site.http.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [NAME, "org/tiny"]
    for model in listed["data"]:
        assert (model["object"], model["owned_by"], model["max_model_len"]) == ("model", "penstock", 64)
        assert (await site.http.get(f"/v1/models/{model['id']}")).json() == model
        assert (await site.post("/v1/completions", **{**ASK, "model": model["id"]}))["model"] == NAME
    response = await site.http.get("/v1/models/other")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_no_model_named_is_the_one_there_is(site: Site) -> None:
    response = await site.http.post("/v1/completions", json=ASK)
    assert response.json()["model"] == NAME


async def test_too_many_requests_in_flight(make_site: Callable[..., Site]) -> None:
    site = make_site(max_in_flight=2)
    site.engine.gate = asyncio.Event()
    held = [asyncio.create_task(site.http.post("/v1/completions", json=ASK)) for _ in range(2)]
    await until(lambda: site.engine.running == 2)
    response = await site.http.post("/v1/completions", json=ASK)
    assert response.status_code == 429
    assert response.json()["error"]["code"] == "too_many_requests"
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert 0 < int(response.headers["retry-after"]) <= 120
    assert (await site.http.get("/health")).status_code == 200
    site.engine.gate.set()
    assert [(await task).status_code for task in held] == [200, 200]
    assert (await site.http.post("/v1/completions", json=ASK)).status_code == 200


async def test_a_draining_server_finishes_what_it_has(site: Site) -> None:
    site.engine.gate = asyncio.Event()
    held = asyncio.create_task(site.http.post("/v1/completions", json=ASK))
    await until(lambda: site.engine.running == 1)
    site.app.lifecycle.draining = True
    response = await site.http.post("/v1/completions", json=ASK)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "draining"
    assert "retry-after" in response.headers
    assert [(await site.http.get(path)).status_code for path in ("/livez", "/readyz", "/health")] == [200, 503, 503]
    site.engine.gate.set()
    assert (await held).status_code == 200
    await asyncio.wait_for(site.app.lifecycle.unused(), PATIENCE)


async def test_a_dead_engine(site: Site) -> None:
    site.engine.status = "ended"
    assert [(await site.http.get(path)).status_code for path in ("/livez", "/readyz", "/health", "/ping")] == [503] * 4
    response = await site.http.post("/v1/completions", json=ASK)
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"
    assert (await site.http.get("/metrics")).status_code == 200
    assert (await site.http.get("/version")).status_code == 200


async def test_other_protocols_are_refused(site: Site) -> None:
    with pytest.raises(RuntimeError, match="lifespan"):
        await site.app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
