"""Implements `penstock repository`: the table of a running server's models, and what loads and unloads them."""

import http.client
import json
import sys
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.top.scrape import NoServer, no_answer, server_url
from penstock.config.sizes import format_bytes
from penstock.config.texts import checked_flag
from penstock.observe.reporting import reporting

SECONDS = 3600.0  # for the answer: a large model may take long to load
MAX_BYTES = 16 << 20  # of an answer


class RepositoryServer:
    """A server with a repository."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises ValueError."""
        try:
            self._address = server_url(url)
        except ValueError as error:
            raise ValueError(f"--url: {error}") from None
        self._key = checked_flag("--key", key)

    def change(self, name: str, what: str, *, dependents: bool = False) -> None:
        """Loads or unloads a model. Exits with status 1 if the server refuses."""
        with reporting(f"{what}ing {name}"):
            self.ask(
                f"/v2/repository/models/{name}/{what}",
                {"parameters": {"unload_dependents": True} if dependents else {}},
            )
        print(f"{name} is {what}ed")

    def show(self) -> None:
        """Prints a table of the models."""
        index = self.ask("/v2/repository/index", {})
        stats = {(each["name"], each.get("version")): each for each in self.ask("/v2/models/stats")["model_stats"]}
        table = Table(box=None, header_style="bold")
        for title in ("MODEL", "VERSION", "STATE"):
            table.add_column(title)
        for title in ("MEMORY", "REQUESTS", "LATENCY", "BATCH"):
            table.add_column(title, justify="right")
        table.add_column("WHY")
        for row in index:
            found = stats.get((row["name"], row.get("version")), {})
            table.add_row(
                row["name"], row.get("version", ""), row.get("state", "not loaded").lower(), *_figures(found),
                row.get("reason", ""),
            )  # fmt: skip
        Console().print(table)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the answer's JSON. Exits with status 1 if the server refuses. Raises NoServer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"Content-Type": "application/json"})
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with urllib.request.urlopen(request, timeout=SECONDS) as answer:
                text = answer.read(MAX_BYTES)
        except urllib.error.HTTPError as error:
            sys.exit(f"penstock: {_refusal(error, self._address)}")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoServer(f"--url: {no_answer(self._address, error)}") from None
        return json.loads(text) if text else None


def _figures(stats: dict[str, Any]) -> tuple[str, str, str, str]:
    """Memory, answered requests, mean latency and mean rows of a batch, as far as they are known."""
    memory = sum(each["byte_size"] for each in stats.get("memory_usage", ()))
    success = stats.get("inference_stats", {}).get("success", {"count": 0, "ns": 0})
    batches = stats.get("execution_count", 0)
    return (
        format_bytes(memory) if memory else "",
        f"{success['count']:,}" if stats else "",
        f"{success['ns'] / success['count'] / 1e6:.2f} ms" if success["count"] else "",
        f"{stats['inference_count'] / batches:.1f}" if batches else "",
    )


def _refusal(error: urllib.error.HTTPError, address: str) -> str:
    """The message of an error answer."""
    try:
        found = json.loads(error.read(MAX_BYTES))["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, LookupError, TypeError):
        return f"{address} answers with status {error.code}: is it a Penstock server of this version?"
