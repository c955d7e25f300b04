"""Web pages of other origins: which ones may use the server, and what a browser is told."""

from collections.abc import Callable

import pytest

from penstock.config import ConfigError, read_settings
from tests.frontend.conftest import Site

APP, OTHER = "https://app.example.com", "http://localhost:3000"
ASK = {"prompt": "hello", "max_tokens": 2}
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def from_page(origin: str) -> dict[str, str]:
    """The headers that a browser adds to a request of a page of another site."""
    return {"origin": origin, "sec-fetch-site": "cross-site"}


async def test_a_page_of_an_allowed_origin_reads_answers_and_errors(make_site: Callable[..., Site]) -> None:
    site = make_site(cors_origin=(APP, OTHER))
    for origin in (APP, OTHER):
        for path, body, status in (("/v1/completions", ASK, 200), ("/v1/completions", {}, 400), ("/nowhere", ASK, 404)):
            response = await site.http.post(path, json=body, headers=from_page(origin))
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == origin
            assert response.headers["vary"] == "origin"
            exposed = response.headers["access-control-expose-headers"]
            assert "x-request-id" in exposed and "x-should-retry" in exposed
            assert "access-control-allow-credentials" not in response.headers


async def test_a_stream_has_the_headers_too(make_site: Callable[..., Site]) -> None:
    site = make_site(cors_origin=(APP,))
    response = await site.http.post("/v1/completions", json={**ASK, "stream": True}, headers=from_page(APP))
    assert response.headers["access-control-allow-origin"] == APP


@pytest.mark.parametrize("key", [None, "secret"])
async def test_a_preflight_is_answered_without_a_key(make_site: Callable[..., Site], key: str | None) -> None:
    site = make_site(cors_origin=(APP,), api_key=key)
    for path in ("/v1/chat/completions", "/v1/models/tiny", "/health", "/nowhere"):
        response = await site.http.options(path, headers={**from_page(APP), **PREFLIGHT})
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == APP
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
    assert site.engine.requests == []


@pytest.mark.parametrize(
    "origin",
    [
        *("https://evil.example", "https://app.example.com.evil.example", "http://app.example.com", "null", "*", ""),
        *("https://app.example.com:8443", "https://APP.example.com", "https://app.example.com/", f"{APP},{OTHER}"),
    ],
)
async def test_another_origin_gets_nothing(make_site: Callable[..., Site], origin: str) -> None:
    site = make_site(cors_origin=(APP,))
    question = await site.http.options("/v1/completions", headers={**from_page(origin), **PREFLIGHT})
    request = await site.http.post("/v1/completions", json=ASK, headers=from_page(origin))
    for response in (question, request):
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "origin_refused"
        assert "access-control-allow-origin" not in response.headers
    assert site.engine.requests == []


async def test_an_allowed_page_needs_the_key_all_the_same(make_site: Callable[..., Site]) -> None:
    site = make_site(cors_origin=(APP,), api_key="secret")
    assert (await site.http.post("/v1/completions", json=ASK, headers=from_page(APP))).status_code == 401
    headers = {**from_page(APP), "authorization": "Bearer secret"}
    assert (await site.http.post("/v1/completions", json=ASK, headers=headers)).status_code == 200


async def test_strange_header_names_are_not_allowed(make_site: Callable[..., Site]) -> None:
    site = make_site(cors_origin=(APP,))
    for names in ("x" * 2000, "a\tb", "a;b"):
        headers = {**from_page(APP), **PREFLIGHT, "access-control-request-headers": names}
        response = await site.http.options("/v1/completions", headers=headers)
        assert (response.status_code, response.headers.get("access-control-allow-headers")) == (204, None)


async def test_without_the_setting_answers_have_no_such_headers(site: Site) -> None:
    response = await site.http.post("/v1/completions", json=ASK, headers={"origin": "http://127.0.0.1"})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control") or name == "vary"]


def test_a_list_of_origins_and_a_text_are_the_same() -> None:
    flags = read_settings({"cors_origin": [APP, OTHER, APP]}).settings
    variable = read_settings(environ={"PENSTOCK_CORS_ORIGIN": f"{APP}, {OTHER}"}).settings
    assert flags.cors_origin == variable.cors_origin == (APP, OTHER)


@pytest.mark.parametrize("origin", ["chrome-extension://abcdef", "app://obsidian.md", "http://[::1]:5173"])
def test_origins_of_browser_extensions_and_apps(origin: str) -> None:
    assert read_settings({"cors_origin": [origin]}).settings.cors_origin == (origin,)


def test_there_is_a_limit() -> None:
    with pytest.raises(ConfigError, match="65 origins are given; the limit is 64: give fewer"):
        read_settings({"cors_origin": [f"https://{i}.example.com" for i in range(65)]})
