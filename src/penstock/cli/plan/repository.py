"""Sizes the language models of a repository, which share this machine."""

from rich.console import Console
from rich.table import Table

from penstock.cli.options import Flags
from penstock.cli.output import write_json
from penstock.cli.serving.repository import find_language_model
from penstock.cli.serving.shares import EngineShares
from penstock.config import DoesNotFit, Given, Resolved, format_bytes
from penstock.messages.tensors import LoadFailed
from penstock.prepare.device import detect_device
from penstock.prepare.model import find_given


def plan_repository(given: Given, flags: Flags, json_file: str | None) -> Resolved | None:
    """Prints what each engine of `penstock serve --repository` would hold. Returns the settings of the model on the
    command line, if there is one. Raises DoesNotFit, after the table, if there are models that cannot be loaded."""
    settings = given.settings
    beside, cache = settings.model is not None, settings.repository_cache
    shares = EngineShares(settings.repository or "", settings.max_loaded, beside=beside, cache_bytes=cache)
    machine = detect_device(settings.device)
    rows: list[tuple[str, int, int, int]] = []
    refused, own = [], None
    for name in (*([] if settings.model is None else [""]), *sorted(shares.languages)):
        try:
            found = find_language_model(shares.folder.read(name).targets[-1], flags) if name else find_given(given)
            resolved = shares.prepare(found, machine).resolved
        except (LoadFailed, ValueError) as error:
            refused.append(f"{name or settings.model}: {error}")
            continue
        own = own if name else resolved
        kv_bytes, most = resolved.memory.kv_bytes, resolved.engine.kv_reserve_bytes
        fixed = sum(row.bytes for row in resolved.memory.rows[:-1]) - kv_bytes  # the last row is free memory
        rows.append((resolved.server.served_model_name, fixed, kv_bytes, most or kv_bytes))
    table = Table(title=f"{shares.at_once} engines at a time share {format_bytes(machine.memory_available)}")
    for heading in ("model", "weights and buffers", "KV cache", "at most"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for row in rows:
        table.add_row(row[0], *map(format_bytes, row[1:]))
    Console().print(table)
    if json_file is not None:
        models = [dict(zip(("name", "fixed", "kv_cache", "kv_cache_most"), row, strict=True)) for row in rows]
        figures = {"memory": machine.memory_available, "engines": shares.at_once, "models": models, "refused": refused}
        write_json(json_file, figures)
    if refused:
        raise DoesNotFit("these models cannot be loaded here: " + "; ".join(refused))
    return own
