"""`penstock plan`: what a model would need, and where every setting comes from. Loads no weights and no torch."""

import json
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.options import Flags
from penstock.cli.prepare import Prepared, memory_table, prepare


def plan(model: str | None, json_file: str | None, flags: Flags) -> None:
    prepared = prepare(model, flags, weights=False)
    console = Console()
    facts = prepared.facts
    console.print(
        f"{prepared.resolved.engine.name}: {facts.family}, {facts.num_parameters / 1e6:,.1f} M parameters, "
        f"{facts.num_layers} layers, context {facts.max_position:,}",
        markup=False,
    )
    console.print(memory_table(prepared.resolved.memory.rows))
    table = Table(title="Settings", title_justify="left")
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, (value, source) in prepared.resolved.provenance.items():
        table.add_row(name, _text(value), source)
    console.print(table)
    if json_file is not None:
        Path(json_file).write_text(json.dumps(_as_json(prepared), indent=2) + "\n")


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _as_json(prepared: Prepared) -> dict[str, Any]:
    resolved = prepared.resolved
    return {
        "model": msgspec.to_builtins(prepared.facts),
        "memory": [{"name": row.name, "bytes": row.bytes, "note": row.note} for row in resolved.memory.rows],
        "num_blocks": list(resolved.memory.num_blocks),
        "settings": {name: {"value": value, "from": source} for name, (value, source) in resolved.provenance.items()},
    }
