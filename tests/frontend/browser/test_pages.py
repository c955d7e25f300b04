"""The pages: who gets them, with which headers, how large they are, and that they are complete."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.frontend import pages
from penstock.frontend.pages.files import load_pages
from tests.frontend.conftest import Site

FOLDER = Path(pages.__file__).parent
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "accept-encoding": "gzip, br"}
PAGES = ["/", "/dashboard", "/docs"]
MOST_BYTES = 150_000  # that a browser receives for one page


def assets(text: str) -> list[str]:
    """The addresses of the files that a page or a file of it names."""
    return re.findall(r"""(?:src|href)="(/pages/[^"]+)"|from "(\.[^"]+)"|import "(\.[^"]+)"|url\((\.[^)]+)\)""", text)


async def fetch_all(site: Site, path: str) -> dict[str, int]:
    """The bytes sent for a page and for everything that it loads, by path."""
    sizes: dict[str, int] = {}
    waiting = [path]
    while waiting:
        at = waiting.pop()
        if at in sizes:
            continue
        async with site.http.stream("GET", at, headers=BROWSER) as response:
            sizes[at] = len(b"".join([chunk async for chunk in response.aiter_raw()]))
        assert response.status_code == 200, at
        plain = await site.http.get(at, headers={**BROWSER, "accept-encoding": "identity"})
        if at.endswith(("html", "js", "css")) or "." not in at:
            found = [next(filter(None, groups)) for groups in assets(plain.text)]
            waiting += [str(response.url.join(name).raw_path, "ascii") for name in found]
    return sizes


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_whole_and_small(site: Site, path: str) -> None:
    sizes = await fetch_all(site, path)
    assert any(name.endswith(".js") for name in sizes) and any(name.endswith(".css") for name in sizes)
    assert any(name.endswith(".woff2") for name in sizes)
    assert sum(sizes.values()) <= MOST_BYTES, sizes


async def test_every_file_is_used(site: Site) -> None:
    used = {path for page in PAGES for path in await fetch_all(site, page)}
    names = {"/".join(path.split("/")[3:]) for path in used if path.startswith("/pages/")}
    assert names == {name for name in load_pages().files if not name.endswith(".html")}


@pytest.mark.parametrize("path", PAGES)
async def test_headers_of_a_page(site: Site, path: str) -> None:
    response = await site.http.get(path, headers=BROWSER)
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on\w+=", response.text)
    again = await site.http.get(path, headers={**BROWSER, "if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_files_never_change_under_their_address(site: Site) -> None:
    version = load_pages().version
    response = await site.http.get(f"/pages/{version}/vendor/preact.js")
    assert "immutable" in response.headers["cache-control"]
    assert response.headers["content-type"] == "text/javascript; charset=utf-8"
    missing = ["0" * 16 + "/vendor/preact.js", f"{version}/vendor/none.js", f"{version}/playground/playground.html"]
    for name in (*missing, f"{version}/vendor/LICENSE.htm", f"{version}/../files.py"):
        assert (await site.http.get(f"/pages/{name}")).status_code == 404, name


async def test_programs_get_no_page(site: Site) -> None:
    for accept in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        response = await site.http.get("/", headers=accept)
        assert "html" not in response.headers["content-type"]
    assert "accept" in (await site.http.get("/", headers=BROWSER)).headers["vary"]


async def test_pages_need_no_key_but_what_they_read_does(make_site: Callable[..., Site]) -> None:
    site = make_site(api_key="secret")
    for path in [*PAGES, f"/pages/{load_pages().version}/shared/base.css"]:
        assert (await site.http.get(path, headers=BROWSER)).status_code == 200
    for path in ("/openapi.json", "/server_info", "/server_load", "/pages", "/pages/", "/docs/", "/pages/a/b", "/Docs"):
        assert (await site.http.get(path, headers=BROWSER)).status_code == 401, path
    for path in ("/pages/x/y/z%2f..", "/pages/x/../../v1/models", "/dashboard%2f", "/pages/x/y/z/w"):
        assert (await site.http.get(path)).status_code == 401, path
    for path in ("/openapi.json", "/server_info", "/server_load"):
        assert (await site.http.get(path, headers={"authorization": "Bearer secret"})).status_code == 200


async def test_only_reading_is_public(make_site: Callable[..., Site]) -> None:
    """A POST to / is TGI's request to generate."""
    keyed, open_to_all = make_site(api_key="secret"), make_site()
    ask = {"inputs": "hello", "parameters": {"max_new_tokens": 2}}
    for path in (*PAGES, f"/pages/{load_pages().version}/shared/base.css"):
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert (await keyed.http.request(method, path, json=ask, headers=BROWSER)).status_code == 401
            linked = {"sec-fetch-site": "cross-site"}
            assert (await open_to_all.http.request(method, path, json=ask, headers=linked)).status_code == 403
    assert keyed.engine.requests == open_to_all.engine.requests == []


async def test_a_link_on_another_site_opens_a_page_but_reads_nothing(site: Site) -> None:
    linked = {**BROWSER, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await site.http.get("/", headers=linked)).status_code == 200
    for path in ("/server_info", "/server_load", "/openapi.json", "/v1/models"):
        assert (await site.http.get(path, headers=linked)).status_code == 403
    own = {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1"}
    assert (await site.http.get("/server_info", headers=own)).status_code == 200
    assert (await site.http.get("/", headers={**BROWSER, "host": "evil.example"})).status_code == 403


async def test_what_a_page_says_of_the_server(make_site: Callable[..., Site]) -> None:
    site = make_site(defaults={"temperature": 0.25}, max_logprobs=7)
    info = (await site.http.get("/server_info")).json()
    assert info["defaults"]["temperature"] == 0.25 and info["defaults"]["top_p"] == 1.0
    assert info["limits"]["max_logprobs"] == 7
    assert info["ranges"]["presence_penalty"] == [-2.0, 2.0]
    for name, (least, most) in info["ranges"].items():
        if name != "logit_bias":
            for value, status in ((least, 200), (most, 200), (most + 0.5, 400)):
                response = await site.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, name: value})
                assert response.status_code == status, (name, value)
    site.says("hello")
    await site.post("/v1/completions", prompt="hello world", max_tokens=4)
    load = (await site.http.get("/server_load")).json()
    assert load["state"] == "ready" and load["counters"]["generation_tokens"] > 0
    for buckets in load["histograms"].values():
        assert buckets[-1][0] is None
        assert [count for _, count in buckets] == sorted(count for _, count in buckets)
    assert load["histograms"]["ttft"][-1][1] > 0


def test_vendored_files_are_the_published_ones() -> None:
    notice = (FOLDER / "vendor" / "NOTICE.md").read_text()
    hashes = dict(re.findall(r"^\| `([^`]+)` .*\| `([0-9a-f]{64})` \|$", notice, re.MULTILINE))
    found = {path.name for path in (FOLDER / "vendor").iterdir() if path.suffix in (".js", ".css", ".woff2")}
    assert found == set(hashes)
    for name, digest in hashes.items():
        assert hashlib.sha256((FOLDER / "vendor" / name).read_bytes()).hexdigest() == digest, name
    for name in re.findall(r"`(LICENSE\.\w+)`", notice):
        assert (FOLDER / "vendor" / name).stat().st_size > 500


def test_no_page_makes_elements_of_text() -> None:
    unsafe = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc")
    for path in FOLDER.glob("*/*.js"):
        if path.parent.name != "vendor":
            assert not unsafe.search(path.read_text()), path
            assert not re.search(r"""["'`(]https?://(?!\[)""", path.read_text().replace("https?:", "")), path
