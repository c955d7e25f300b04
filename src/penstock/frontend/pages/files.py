"""The files of the pages. They are read and compressed once, at the first request for a page."""

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Answer

_FOLDERS = ("shared", "playground", "dashboard", "docs", "vendor")
_TYPES = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "woff2": b"font/woff2",
}
_COMPRESSED = ("woff2",)  # by itself
_VERSION = b"{version}"  # in a page: replaced by the version of the files
# Nothing is loaded from elsewhere, and no text of a model can run: scripts and styles are files of this server.
_POLICY = "; ".join(
    (
        *("default-src 'none'", "script-src 'self'", "style-src 'self'", "font-src 'self'", "img-src 'self' data:"),
        *("connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        "require-trusted-types-for 'script'",
    )
)
_SAFE = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class PageFile(NamedTuple):
    """A file as it is sent."""

    content_type: bytes
    plain: bytes
    gzipped: bytes | None
    etag: str


class Pages(NamedTuple):
    """All files. `version` changes with any of them, so a file under its version never changes."""

    version: str
    files: Mapping[str, PageFile]


@cache
def load_pages() -> Pages:
    """Reads all files of the pages: 0.3 MB."""
    contents = {}
    for folder in _FOLDERS:
        for entry in files(__package__).joinpath(folder).iterdir():
            if entry.name.rpartition(".")[2] in _TYPES:
                contents[f"{folder}/{entry.name}"] = entry.read_bytes()
    whole = hashlib.sha256()
    for name, content in sorted(contents.items()):
        whole.update(b"%s %d " % (name.encode(), len(content)) + content)
    version = whole.hexdigest()[:16]
    return Pages(version, {name: _page_file(name, content, version) for name, content in contents.items()})


def _page_file(name: str, content: bytes, version: str) -> PageFile:
    kind = name.rpartition(".")[2]
    if kind == "html":
        content = content.replace(_VERSION, version.encode())
    gzipped = None if kind in _COMPRESSED else gzip.compress(content, 9, mtime=0)
    return PageFile(_TYPES[kind], content, gzipped, f'"{version}"')


async def show_playground(body: bytes, context: RequestContext) -> Answer:
    return _page("playground", context, {"vary": "accept, accept-encoding"})


async def show_dashboard(body: bytes, context: RequestContext) -> Answer:
    return _page("dashboard", context)


async def show_docs(body: bytes, context: RequestContext) -> Answer:
    return _page("docs", context)


async def show_file(body: bytes, context: RequestContext) -> Answer:
    """Answers with a file under its version. Raises APIError 404 for another version or name."""
    pages = load_pages()
    found = pages.files.get(f"{context.path['folder']}/{context.path['file']}")
    if context.path["version"] != pages.version or found is None or found.content_type == _TYPES["html"]:
        raise APIError(404, "there is no such file of a page; load the page again", code="not_found")
    return _answer(found, context, "public, max-age=31536000, immutable", {})


def _page(name: str, context: RequestContext, headers: Mapping[str, str] | None = None) -> Answer:
    return _answer(load_pages().files[f"{name}/{name}.html"], context, "no-cache", headers or {})


def _answer(file: PageFile, context: RequestContext, caching: str, more: Mapping[str, str]) -> Answer:
    headers = {**_SAFE, "cache-control": caching, "etag": file.etag, "vary": "accept-encoding", **more}
    if file.etag in _header(context, b"if-none-match"):
        return Answer(b"", 304, file.content_type, headers)
    if file.gzipped is not None and "gzip" in _header(context, b"accept-encoding"):
        return Answer(file.gzipped, 200, file.content_type, {**headers, "content-encoding": "gzip"})
    return Answer(file.plain, 200, file.content_type, headers)


def _header(context: RequestContext, name: bytes) -> str:
    return ",".join(value.decode("latin-1") for key, value in context.headers if key == name).lower()
