"""Sends a running server the request to reload, to sleep or to wake."""

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping

from penstock.cli.top.scrape import NoServer, no_answer, server_url
from penstock.config.texts import checked_flag
from penstock.observe.reporting import reporting

SECONDS = 3600.0  # for the answer: a large model may have to be downloaded and loaded
MAX_BYTES = 1 << 20  # of the answer

# By path: what the command does while it waits, and what it prints in the end if the server sends no message.
_WORDS: Mapping[str, tuple[str, str]] = {
    "/reload": ("reloading", ""),
    "/sleep": ("ending the engine", "asleep: the engine has ended, and the next request starts it"),
    "/wake_up": ("starting the engine", "awake"),
}


def ask(url: str, path: str, admin_key: str | None, query: str = "") -> None:
    """Prints the server's answer to a POST. Exits with status 1 if the server refuses or fails. Raises ValueError and
    NoServer."""
    address, key = server_url(url), checked_flag("--admin-key", admin_key)
    doing, done = _WORDS[path]
    request = urllib.request.Request(f"{address}{path}{query}", data=b"")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with reporting(doing), urllib.request.urlopen(request, timeout=SECONDS) as answer:
            body = answer.read(MAX_BYTES)
    except urllib.error.HTTPError as error:
        sys.exit(f"penstock: {_refusal(error, address)}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoServer(no_answer(address, error)) from None
    print(json.loads(body).get("message", done))


def _refusal(error: urllib.error.HTTPError, address: str) -> str:
    try:
        return str(json.loads(error.read(MAX_BYTES))["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{address} answers with status {error.code}: is it a Penstock server of this version?"
