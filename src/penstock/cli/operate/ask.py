"""Sends a running server the request to reload, to sleep or to wake, and other requests of an operator."""

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from penstock.cli.top.scrape import NoServer, no_answer, server_url
from penstock.config.texts import checked_flag
from penstock.observe.reporting import reporting

SECONDS = 3600.0  # for the answer: a large model may have to be downloaded and loaded
MAX_BYTES = 16 << 20  # of the answer

# By path: what the command does while it waits, and what it prints in the end if the server sends no message.
_WORDS: Mapping[str, tuple[str, str]] = {
    "/reload": ("reloading", ""),
    "/sleep": ("ending the engine", "asleep: the engine has ended, and the next request starts it"),
    "/wake_up": ("starting the engine", "awake"),
}


def ask(url: str, path: str, admin_key: str | None, query: str = "") -> None:
    """Prints the server's answer to a POST. Exits with status 1 if the server refuses or fails. Raises ValueError and
    NoServer."""
    key = checked_flag("--admin-key", admin_key)
    doing, done = _WORDS[path]
    with reporting(doing):
        answer = fetch(url, path + query, key, b"")
    print(answer.get("message", done))


def fetch(url: str, path: str, key: str | None, body: bytes | None = None) -> Any:
    """Returns the JSON of an answer, {} if it is empty. Without `body` the request is a GET. Exits with status 1 if the
    server refuses or fails. Raises ValueError and NoServer."""
    address = server_url(url)
    request = urllib.request.Request(address + path, body, {"Content-Type": "application/json"} if body else {})
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            text = answer.read(MAX_BYTES)
    except urllib.error.HTTPError as error:
        sys.exit(f"penstock: {_refusal(error, address)}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoServer(no_answer(address, error)) from None
    return json.loads(text or b"{}")


def _refusal(error: urllib.error.HTTPError, address: str) -> str:
    """The message of an error answer, in the form of OpenAI's API or of KServe's."""
    try:
        found = json.loads(error.read(MAX_BYTES))["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, LookupError, TypeError):
        return f"{address} answers with status {error.code}: is it a Penstock server of this version?"
