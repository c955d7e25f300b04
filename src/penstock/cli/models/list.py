"""Implements `penstock list`."""

import json
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.cli.models.facts import LocalModelFacts
from penstock.cli.models.table import count_text, print_table
from penstock.config import format_bytes
from penstock.observe.reporting import reporting
from penstock.weights.cached_models import LocalModel
from penstock.weights.local_models import local_models
from penstock.weights.packaged import PACKAGED

HEADERS_SECONDS = 10.0  # for reading the headers of all models


@dataclass(frozen=True)
class ListedModel:
    """A row of the table. Facts that could not be read are None; `problem` then says why."""

    model: LocalModel
    format: str | None = None
    context: int | None = None
    parameters: int | None = None
    problem: str = ""


def list_models(as_json: bool) -> None:
    rows = _read(local_models())
    if as_json:
        print(json.dumps([_json(row) for row in rows], indent=2))
        return
    print_table([_cells(row) for row in rows])
    for row in rows:
        if row.problem and row.problem != row.model.problem:
            print(f"{row.model.name}: {row.problem}", file=sys.stderr)
    for package in PACKAGED:
        if package.find() is None:
            print(f"{package.name}, {package.purpose}, is not installed: run {package.install}", file=sys.stderr)


def _read(models: list[LocalModel]) -> list[ListedModel]:
    deadline, rows = time.monotonic() + HEADERS_SECONDS, []
    with reporting("reading headers") as say:
        for model in models:
            rows.append(_facts(model, time.monotonic() < deadline))
            say(f"{len(rows)} of {len(models)} headers read")
    return rows


def _facts(model: LocalModel, in_time: bool) -> ListedModel:
    if model.path is None:
        return ListedModel(model, problem=model.problem)
    if not in_time:
        return ListedModel(model, problem=f"not read within {HEADERS_SECONDS:g} s; penstock show reads it")
    facts = LocalModelFacts(model.path)
    try:
        return ListedModel(model, facts.format, facts.context, facts.parameters)
    except (ValueError, OSError) as error:  # of a broken file
        return ListedModel(model, problem=str(error))


def _cells(row: ListedModel) -> dict[str, str]:
    model = row.model
    state = row.format or model.problem or "unreadable"
    return {
        "NAME": model.name,
        "REVISION": model.revision[:12] if model.revision and "main" not in model.refs else "",
        "FORMAT": state,
        "SIZE": format_bytes(model.size),
        "CONTEXT": "–" if row.context is None else f"{row.context:,}",
        "PARAMETERS": "–" if row.parameters is None else count_text(row.parameters),
        "MODIFIED": _ago(time.time() - model.modified),
        "WHERE": model.where,
    }


def _json(row: ListedModel) -> dict[str, object]:
    model = row.model
    return {
        "name": model.name,
        "path": None if model.path is None else str(model.path),
        "where": model.where,
        "format": row.format,
        "size": model.size,
        "context": row.context,
        "parameters": row.parameters,
        "modified": datetime.fromtimestamp(model.modified, UTC).isoformat(timespec="seconds"),
        "revision": model.revision or None,
        "refs": list(model.refs),
        "problem": row.problem or None,
    }


def _ago(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
