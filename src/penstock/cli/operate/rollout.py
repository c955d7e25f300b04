"""Implements `penstock rollout`: begins, changes and shows the rollouts of a running server."""

from typing import Any, Literal, get_args

from rich.console import Console
from rich.table import Table

from penstock.cli.operate.repository import RepositoryServer

What = Literal["status", "start", "pause", "resume", "abort"]
WHAT = get_args(What)
SHADOW = "shadow"


def read_plan(text: str) -> list[int]:
    """Returns the shares of a plan such as shadow,1,10,100. Raises ValueError."""
    parts = [part.strip().removesuffix("%") for part in text.split(",")]
    if not all(part == SHADOW or part.isdigit() for part in parts):
        raise ValueError(f"--plan is {text!r:.100}: give shares in percent, such as {SHADOW},1,10,50,100")
    return [0 if part == SHADOW else int(part) for part in parts]


def read_judges(texts: list[str]) -> dict[str, float]:
    """Returns the tolerances of judges such as brier=0.01. Raises ValueError."""
    found = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ValueError(f"--judge is {text!r:.100}: give NAME=TOLERANCE, such as brier=0.01") from None
    return found


def change_rollout(server: RepositoryServer, name: str, what: str, fields: dict[str, Any]) -> None:
    """Exits with status 1 if the server refuses."""
    server.ask(f"/v2/repository/models/{name}/rollout", {"action": what, **fields})
    print(f"the rollout of {name} was {what.removesuffix('e')}ed; penstock rollout shows where it stands")


def show_rollouts(server: RepositoryServer) -> None:
    """Prints where each rollout stands, and a table of its judges."""
    console = Console()
    rows = server.ask("/v2/repository/rollouts")["rollouts"]
    if not rows:
        print("no rollout was started; begin one with: penstock rollout start NAME --candidate VERSION")
    for row in rows:
        share = f"{row['share']}%" if row["share"] else SHADOW
        status = f"{row['status']} at {share}" if row["status"] in ("running", "paused") else row["status"]
        console.print(
            f"{row['name']}: version {row['candidate']} in place of {row['incumbent']}, {status}", highlight=False
        )
        if row["reason"]:
            console.print(row["reason"], highlight=False)
        table = Table(box=None, header_style="bold")
        table.add_column("JUDGE")
        for title in ("REQUESTS", "WORSE BY", "TOLERATED"):
            table.add_column(title, justify="right")
        for judge in row["judges"]:
            between = f"{judge['low']:+.3f} to {judge['high']:+.3f}" if judge["requests"] else ""
            table.add_row(judge["name"], f"{judge['requests']:,}", between, f"{judge['tolerance']:g}")
        console.print(table)
