"""Implements `penstock repository`: the table of a running server's models, and what loads and unloads them."""

import json
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.operate.ask import fetch
from penstock.cli.top.scrape import NoServer
from penstock.config.sizes import format_bytes
from penstock.config.texts import checked_flag
from penstock.observe.reporting import reporting

RATE_SECONDS = 1.0  # over which requests are counted


class RepositoryServer:
    """A server with a repository."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises ValueError."""
        self._url, self._key = url, checked_flag("--key", key)

    def change(self, name: str, what: str, *, dependents: bool = False) -> None:
        """Loads or unloads a model. Exits with status 1 if the server refuses."""
        parameters = {"unload_dependents": True} if dependents else {}
        with reporting(f"{what}ing {name}"):
            self.ask(f"/v2/repository/models/{name}/{what}", {"parameters": parameters})
        print(f"{name} is {what}ed")

    def show(self) -> None:
        """Prints a table of the models."""
        index, before = self.ask("/v2/repository/index", {}), self._stats()
        time.sleep(RATE_SECONDS)
        stats = self._stats()
        table = Table(box=None, header_style="bold")
        for title in ("MODEL", "VERSION", "STATE"):
            table.add_column(title, no_wrap=True)
        for title in ("MEMORY", "REQUESTS", "RATE", "LATENCY", "BATCH"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("WHY")
        for row in index:
            key = row["name"], row.get("version", "")
            figures = _figures(stats.get(key, {}), before.get(key, {}))
            table.add_row(*key, row.get("state", "not loaded").lower(), *figures, row.get("reason", ""))
        Console().print(table)

    def _stats(self) -> dict[tuple[str, str], Any]:
        return {(each["name"], each["version"]): each for each in self.ask("/v2/models/stats")["model_stats"]}

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Returns the answer's JSON. Exits with status 1 if the server refuses. Raises ValueError and NoServer."""
        try:
            return fetch(self._url, path, self._key, None if body is None else json.dumps(body).encode())
        except (NoServer, ValueError) as error:
            raise type(error)(f"--url: {error}") from None


def _figures(stats: dict[str, Any], before: dict[str, Any]) -> tuple[str, ...]:
    """Memory, answered requests, their rate, mean latency and mean rows of a batch, as far as they are known."""
    memory = sum(each["byte_size"] for each in stats.get("memory_usage", ()))
    success, earlier = (each.get("inference_stats", {}).get("success", {"count": 0}) for each in (stats, before))
    batches = stats.get("execution_count", 0)
    return (
        format_bytes(memory) if memory else "",
        f"{success['count']:,}" if stats else "",
        f"{(success['count'] - earlier['count']) / RATE_SECONDS:,.0f}/s" if stats else "",
        f"{success['ns'] / success['count'] / 1e6:.2f} ms" if success["count"] else "",
        f"{stats['inference_count'] / batches:.1f}" if batches else "",
    )
