"""From what the user typed to a complete configuration: find the model, read what it is, resolve every setting."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from penstock.cli.embedded import default_model
from penstock.cli.options import Flags
from penstock.config import ModelFacts, Resolved, detect_hardware, format_bytes, gather, resolve
from penstock.families import ModelSpec, load_spec, model_facts
from penstock.messages import MemoryRow
from penstock.weights.hub import locate_model


@dataclass(frozen=True)
class Prepared:
    """A model's folder, what it is, and the settings it will run with."""

    folder: Path
    spec: ModelSpec
    facts: ModelFacts
    resolved: Resolved


def prepare(model: str | None, flags: Flags, *, weights: bool = True) -> Prepared:
    """Everything that can be known before a process is started or a weight is read.

    A hub id is downloaded, without its weights where those are not wanted. Raises ConfigError, DoesNotFit,
    UnsupportedModel and HubError: ValueErrors that say what to change.
    """
    settings = dict(flags)
    file = settings.pop("config", None)
    given = gather({**settings, "model": model}, os.environ, Path(file) if file else None)
    named = given.settings.model
    folder = default_model() if named is None else locate_model(named, given.settings.revision, weights=weights)
    spec = load_spec(folder)
    facts = model_facts(spec)
    return Prepared(folder, spec, facts, resolve(given, facts, detect_hardware(), folder=str(folder)))


def memory_table(rows: Sequence[MemoryRow], title: str = "Memory") -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("for")
    table.add_column("size", justify="right")
    table.add_column("", style="dim", overflow="fold")
    for row in rows:
        table.add_row(row.name, format_bytes(row.bytes), row.note, end_section=row is rows[-2])
    return table
