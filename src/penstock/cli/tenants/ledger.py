"""Implements `penstock ledger summary | export`."""

import csv
import datetime
import json
import os
import sqlite3
import sys
from pathlib import Path

from penstock.cli.models.table import print_table
from penstock.config.state import state_home
from penstock.config.tenants.file import NAME
from penstock.frontend.tenants.ledger import FIELDS, FILE, GROUPS, SUMMED, rows_of, summary
from penstock.frontend.tenants.quotas import NANO

_SHOWN = ("requests", "prompt", "cached", "output", "computed")


def show_summary(
    by: str, since: str | None, until: str | None, tenant: str | None, ledger: str | None, port: int, *, as_json: bool
) -> None:
    """Prints a row for each group. Raises ValueError."""
    groups = [name.strip() for name in by.split(",")]
    if unknown := [name for name in groups if name not in GROUPS]:
        raise ValueError(f"--by is {by!r}: there is no {unknown[0]!r}; give names of {', '.join(GROUPS)}")
    times, only = interval(since, until), one_tenant(tenant)
    rows = summary(open_for_reading(ledger, port), groups, *times, only or "")
    found = [dict(zip((*groups, *SUMMED), row, strict=True)) for row in rows]
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        print("the ledger has no request of this time")
        return
    table = []
    for row in found:
        cells = {name.upper(): str(row[name]) for name in groups}
        cells |= {name.upper(): f"{row[name]:,}" for name in _SHOWN}
        cells["SECONDS"] = f"{row['step_ms'] / 1000:,.1f}"
        cells["JOULES"] = f"{row['joules']:,.0f}" if row["joules"] else ""
        cells["COST"] = f"{row['nano'] / NANO:,.6f}" if row["nano"] else ""
        table.append(cells)
    print_table(table)


def export(since: str | None, until: str | None, tenant: str | None, form: str, ledger: str | None, port: int) -> None:
    """Prints the requests to standard output. Raises ValueError."""
    if form not in ("csv", "jsonl"):
        raise ValueError(f"--format is {form!r}: give csv or jsonl")
    times, only = interval(since, until), one_tenant(tenant)
    where: dict[str, object] = {} if only is None else {"tenant = ?": only}
    rows = rows_of(open_for_reading(ledger, port), *times, where)
    if form == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(FIELDS)
        writer.writerows(rows)
        return
    for row in rows:
        print(json.dumps(dict(zip(FIELDS, row, strict=True))))


def open_for_reading(ledger: str | None, port: int) -> sqlite3.Connection:
    """Returns a connection to a ledger, by default to that of the server on a port. Raises ValueError."""
    if ledger == "":
        raise ValueError("--ledger is '': it is empty; name a file, or leave it out")
    path = Path(ledger) if ledger else state_home(os.environ) / "penstock" / f"port-{port}" / FILE
    if path.is_dir():
        path /= FILE
    if not path.is_file():
        raise ValueError(f"there is no ledger {path}: name one with --ledger, or give the server's --port")
    try:
        connection = sqlite3.connect(f"file:{path.resolve()}?mode=ro", uri=True, timeout=30)
        connection.execute(f"SELECT {', '.join(FIELDS)} FROM requests WHERE began < 0")
    except sqlite3.Error as error:
        raise ValueError(f"{path} is no ledger that can be read: {error}; name one with --ledger") from None
    return connection


def one_tenant(tenant: str | None) -> str | None:
    """Returns the tenant of --tenant. Raises ValueError for what is no name."""
    if tenant is not None and not NAME.fullmatch(tenant):
        raise ValueError(f"--tenant is {tenant!r}: give a tenant's name, or leave it out for all")
    return tenant


def interval(since: str | None, until: str | None) -> tuple[float, float]:
    """Returns the begin of the first day and the end of the last one, in seconds since the epoch. Raises ValueError."""
    start = 0.0 if since is None else _day("--since", since).timestamp()
    end = datetime.datetime.now(datetime.UTC) if until is None else _day("--until", until)
    return start, (end + datetime.timedelta(days=1)).timestamp()


def _day(flag: str, text: str) -> datetime.datetime:
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=datetime.UTC)
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: give a day, such as 2026-11-01") from None
