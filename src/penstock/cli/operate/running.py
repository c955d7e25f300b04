"""Implements `penstock ps` and `penstock stop`, with the routes of Ollama's API that do the same."""

from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.operate.ask import fetch
from penstock.cli.operate.repository import RepositoryServer
from penstock.config.sizes import format_bytes
from penstock.config.texts import checked_flag

_FAR = 100 * 86400  # seconds: a later end is none


def show_running(url: str, key: str | None) -> None:
    """Prints a table of the models that have an engine. Exits with status 1 if the server refuses. Raises ValueError
    and NoServer."""
    models = fetch(url, "/api/ps", checked_flag("--key", key))["models"]
    table = Table(box=None, header_style="bold")
    table.add_column("MODEL", no_wrap=True)
    for title in ("FILES", "CONTEXT", "ENDS"):
        table.add_column(title, justify="right", no_wrap=True)
    for model in models:
        name = model["name"].removesuffix(":latest")
        table.add_row(name, format_bytes(model["size"]), f"{model['context_length']:,}", _ends(model))
    Console().print(table)


def stop(url: str, key: str | None, name: str) -> None:
    """Ends the engine of a model after its last request. Exits with status 1 if the server refuses. Raises ValueError
    and NoServer."""
    if not name:
        raise ValueError("NAME is empty: give the name of a model")
    RepositoryServer(url, key).ask("/api/generate", {"model": name, "keep_alive": 0, "stream": False})
    print(f"{name} ends after its last request, if it is a model of a repository")


def _ends(model: dict[str, Any]) -> str:
    """When the engine of a model ends if no request comes."""
    left = (datetime.fromisoformat(model["expires_at"]) - datetime.now(UTC)).total_seconds()
    return "never" if left > _FAR else f"in {max(left, 0):.0f} s"
