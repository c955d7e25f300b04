"""A small hub on loopback that speaks the protocol huggingface_hub speaks, with faults to inject.

GET /api/models/{id}[/revision/{rev}]          what the model is: its commit and files
GET /api/models/{id}/tree/{commit}             the same files as a listing
HEAD, GET /{id}/resolve/{rev}/{file}           a file: ETag, X-Repo-Commit, X-Linked-Etag, X-Linked-Size, Range
"""

import hashlib
import json
import re
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "acme/tiny"
TOKEN = "hf_secret"
IN_GIT = (".json", ".jinja", ".md")  # other files are in large file storage


class StandInHub:
    """One model, on branch main. Faults are set before a download and looked at when a request comes."""

    def __init__(self, files: dict[str, bytes], name: str = MODEL) -> None:
        self.files = files
        self.name = name
        self.commit = hashlib.sha1(b"".join(files.values())).hexdigest()
        self.cut_after: dict[str, int] = {}  # file -> bytes of its first answer before the connection breaks
        self.stall_after: dict[str, int] = {}  # file -> bytes of its first answer before it waits for `go_on`
        self.go_on = threading.Event()
        self.delay = 0.0  # seconds before the model is described
        self.lost = ""  # a file of which no answer ever comes through
        self.corrupt: set[str] = set()  # files of which a byte is changed on the way
        self.status: int | None = None  # every answer's
        self.error_code = ""  # as the hub names it in X-Error-Code
        self.private = False  # only with TOKEN
        self.whole_files_only = False  # Range is ignored, as some mirrors do
        self.headers: dict[str, str] = {}  # of each file's answer, in the place of the right ones
        self.padding: dict[str, int] = {}  # file -> bytes that are sent beyond its content, without a length
        self.unstated = ""  # a file whose size and digest are not listed
        self.drips: set[str] = set()  # files, or "the list", that are sent a byte at a time
        self.gated = False  # anybody may see the list of files, but not their content
        self.requests: list[tuple[str, str, str]] = []  # method, path, Range
        self.url = ""

    def served(self, file: str) -> Counter[str]:
        """How often a file's content was asked for, by the Range header."""
        return Counter(span for method, path, span in self.requests if method == "GET" and path.endswith("/" + file))


@lru_cache(32)
def described(name: str, content: bytes) -> dict[str, object]:
    """A file as the listing shows it."""
    entry = {"type": "file", "path": name, "rfilename": name, "size": len(content)}
    if name.endswith(IN_GIT):
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {**entry, "oid": oid, "blobId": oid}
    sha = hashlib.sha256(content).hexdigest()
    oid = hashlib.sha1(sha.encode()).hexdigest()  # of the pointer that git has
    lfs = {"oid": sha, "sha256": sha, "size": len(content), "pointerSize": 130}
    return {**entry, "oid": oid, "blobId": oid, "lfs": lfs}


class _Request(BaseHTTPRequestHandler):
    hub: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub = self.hub
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range", "")))
        if hub.status is not None:
            return self._send(hub.status, b"", {"X-Error-Code": hub.error_code} if hub.error_code else {}, body)
        if hub.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, b"", {}, body)
        if info := re.fullmatch(f"/api/models/{hub.name}(?:/revision/([^/]+))?", path):
            return self._info(info[1] or "main", body)
        if tree := re.fullmatch(f"/api/models/{hub.name}/tree/([^/]+)", path):
            return self._tree(tree[1], body)
        if file := re.fullmatch(f"/{hub.name}/resolve/([^/]+)/(.+)", path):
            return self._file(file[2], body)
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def _known(self, revision: str) -> bool:
        return revision in ("main", self.hub.commit)

    def _info(self, revision: str, body: bool) -> None:
        if not self._known(revision):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        time.sleep(self.hub.delay)
        siblings = [
            {"rfilename": name} if name == self.hub.unstated else described(name, content)
            for name, content in self.hub.files.items()
        ]
        info = {"id": self.hub.name, "modelId": self.hub.name, "sha": self.hub.commit, "siblings": siblings, "tags": []}
        content = json.dumps(info).encode()
        if "the list" in self.hub.drips:
            return self._drip(content, {"Content-Type": "application/json"})
        return self._send(200, content, {"Content-Type": "application/json"}, body)

    def _drip(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with suppress(ConnectionError):
            for byte in content:
                self.wfile.write(bytes([byte]))
                self.wfile.flush()
                if self.hub.go_on.wait(0.05):
                    return

    def _pad(self, content: bytes, more: int, headers: dict[str, str]) -> None:
        """Sends a file without its length, and more after it."""
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        with suppress(ConnectionError):
            self.wfile.write(content)
            for _ in range(more >> 16):
                self.wfile.write(bytes(1 << 16))

    def _tree(self, revision: str, body: bool) -> None:
        if not self._known(revision):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        listing = [described(name, content) for name, content in self.hub.files.items()]
        return self._send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, body)

    def _file(self, name: str, body: bool) -> None:
        hub = self.hub
        content = hub.files.get(name)
        if hub.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": hub.commit}, body)
        entry = described(name, content)
        lfs = entry.get("lfs")
        etag = lfs["sha256"] if isinstance(lfs, dict) else entry["oid"]
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": hub.commit, "Accept-Ranges": "bytes"}
        if lfs:
            headers |= {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(len(content))}
        headers |= hub.headers
        if body and name in hub.drips:
            return self._drip(content, headers)
        if body and name in hub.padding:
            return self._pad(content, hub.padding[name], headers)
        if name in hub.corrupt:
            content = content[:-1] + bytes([content[-1] ^ 1])
        status, start = 200, 0
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if span and not hub.whole_files_only:
            start = int(span[1])
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        cut = 0 if hub.lost == name else hub.cut_after.pop(name, None) if body else None
        stall = hub.stall_after.pop(name, None) if body else None
        return self._send(status, content[start:], headers, body, cut=cut, stall=stall)

    def _send(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        body: bool,
        *,
        cut: int | None = None,
        stall: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and stall is not None:
            self.wfile.write(content[:stall])
            self.wfile.flush()
            self.hub.go_on.wait(60)
            content = content[stall:]
        if body:
            with suppress(ConnectionError):  # the client may have been interrupted
                self.wfile.write(content[:cut])
        if body and cut is not None:
            self.wfile.flush()
            self.close_connection = True


class _RequestToSeveral(_Request):
    hubs: dict[str, StandInHub]

    def _answer(self, *, body: bool) -> None:
        named = re.match(r"(?:/api/models)?/([^/]+/[^/?]+)", urllib.parse.unquote(self.path))
        self.hub = self.hubs.get(named[1] if named else "", self.hub)  # the default answers 404
        super()._answer(body=body)


@contextmanager
def serving(files: dict[str, bytes], name: str = MODEL) -> Iterator[StandInHub]:
    """A hub with these files until the block ends."""
    hub = StandInHub(files, name)
    with _listening(type("Request", (_Request,), {"hub": hub})) as hub.url:
        try:
            yield hub
        finally:
            hub.go_on.set()


@contextmanager
def serving_several(models: dict[str, dict[str, bytes]]) -> Iterator[str]:
    """A hub with the files of several models until the block ends. Yields its address."""
    hubs = {name: StandInHub(files, name) for name, files in models.items()}
    handler = type("Request", (_RequestToSeveral,), {"hubs": hubs, "hub": next(iter(hubs.values()))})
    with _listening(handler) as url:
        yield url


@contextmanager
def _listening(handler: type[_Request]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
