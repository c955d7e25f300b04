"""The figures of experiments as a table, and as a file that several runs fill."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import provenance

Row = dict[str, Any]


class WrongFile(ValueError):
    """A file that rows cannot be added to."""


class Report:
    """A file of rows, one for each experiment, with where each comes from. Those of other experiments stay."""

    def __init__(self, path: Path, order: Sequence[str]) -> None:
        """`order` is that of the experiments' numbers. Raises WrongFile."""
        self._path = path
        self._order = {number: place for place, number in enumerate(order)}
        self._run = provenance()
        self._rows: dict[str, Row] = {}
        if path.exists():
            known = _read(path)
            if known["hardware"] != self._run["hardware"]:
                raise WrongFile(f"{path} is of another machine: {known['hardware']}; this is {self._run['hardware']}")
            self._rows = {row["experiment"]: row for row in known["experiments"]}

    def add(self, row: Row) -> None:
        """Writes the file with this row, and with those that it has of other experiments."""
        source = {name: self._run[name] for name in ("commit", "date")}
        number = row["experiment"]
        self._rows[number] = {**row, **source}
        rows = sorted(self._rows.values(), key=lambda one: self._order.get(one["experiment"], len(self._order)))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({**self._run, "benchmark": "chaos", "experiments": rows}, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
        known["hardware"], known["experiments"]
    except (ValueError, KeyError, TypeError) as error:
        raise WrongFile(f"{path} has no figures of make chaos: {error!r}; name another file") from error
    assert isinstance(known, dict)
    return known


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Experiments", title_justify="left")
    for heading in ("", "what", "result", "s", "figures"):
        table.add_column(heading, justify="right" if heading == "s" else "left", overflow="fold")
    for row in rows:
        shown = row.get("error", "").strip().splitlines()[:1] or [
            f"{name.replace('_', ' ')} {value}" for name, value in row.get("figures", {}).items()
        ]
        table.add_row(row["experiment"], row["what"], row["result"], str(row["seconds"]), ", ".join(shown))
    Console().print(table)
