"""Implements `penstock plan`: shows a model's memory, its possible splits, and the source of every setting.

It loads neither weights nor torch.
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.device import detect_device
from penstock.cli.options import Flags
from penstock.cli.output import check_file, write_file
from penstock.cli.prepare import FoundModel, find_model, memory_table
from penstock.config import DoesNotFit, Hardware, Resolved, Split, detect_hardware, format_bytes
from penstock.config.defaults import QUANTIZATION_GROUP
from penstock.config.devices import Devices, parse_devices, this_machine, with_link
from penstock.config.weights import GGUF_FORMATS
from penstock.families import model_facts
from penstock.families.shard import possible_splits
from penstock.families.step_cost import StepCost, step_cost
from penstock.families.traffic import step_traffic
from penstock.gguf import GgufFile, is_gguf, read_gguf


@dataclass(frozen=True)
class PlannedSplit:
    """Holds a split that fits in memory, and the cost of its steps."""

    resolved: Resolved
    decode: StepCost  # a step of one sequence
    prefill: StepCost  # a step of max_num_batched_tokens tokens of prompts
    asked: bool  # the split that the settings ask for

    @property
    def split(self) -> Split:
        return self.resolved.engine.split


def plan(model: str | None, hardware: str | None, link: str | None, json_file: str | None, flags: Flags) -> None:
    check_file("--json", json_file)
    found = find_model(model, flags, weights=False)
    machine, devices = _devices(found, hardware, link)
    console, facts = Console(), model_facts(found.spec)
    file = read_gguf(found.path) if is_gguf(found.path) else None
    try:
        resolved = found.resolve(machine)
    except DoesNotFit as error:
        others = _splits(found, machine, devices, None)
        if not others:
            raise
        _show_splits(console, others, devices)
        raise DoesNotFit(f"{error}, or one of the splits above") from None
    if not devices.shared and len(resolved.ranks) > devices.count:
        raise ValueError(
            f"{resolved.engine.split} takes {len(resolved.ranks)} ranks, but {devices.name} has {devices.count}: set "
            "--hardware with more devices, or fewer ranks"
        )
    console.print(
        f"{resolved.engine.name}: {facts.family}, {facts.num_parameters / 1e6:,.1f} M parameters, "
        f"{facts.num_layers} layers, context {facts.max_position:,}",
        markup=False,
    )
    splits = _splits(found, machine, devices, resolved)
    if file is not None:
        _show_types(console, file)
    console.print(memory_table(resolved))
    _show_splits(console, splits, devices)
    table = Table(title="Settings", title_justify="left")
    for heading in ("setting", "value", "from"):
        table.add_column(heading, overflow="fold")
    for name, (value, source) in resolved.provenance.items():
        table.add_row(name, _text(value), source)
    console.print(table)
    if json_file is not None:
        figures = _as_json(found, resolved, splits, devices) | ({} if file is None else {"types": _types(file)})
        write_file("--json", json_file, json.dumps(figures, indent=2) + "\n")


def _devices(found: FoundModel, hardware: str | None, link: str | None) -> tuple[Hardware, Devices]:
    """Returns the hardware to plan for, in two forms: for the settings, and for the cost of splits.

    Figures in --hardware are a CPU's unless --device is cuda.
    """
    asked = found.given.settings.device
    if hardware is None:
        here = detect_device(asked)
        devices = this_machine(here)
    else:
        here = detect_hardware()
        devices = parse_devices(hardware, "cuda" if asked == "cuda" else "cpu")
    devices = with_link(devices, link)
    return devices.machine(here), devices


def _splits(found: FoundModel, machine: Hardware, devices: Devices, asked: Resolved | None) -> list[PlannedSplit]:
    """Returns the possible splits that fit in memory, and the split that was asked for."""
    settings = found.given.settings
    group = (settings.quantization_group or QUANTIZATION_GROUP) if settings.quantization == "int4" else 1
    splits = dict.fromkeys(possible_splits(found.spec, devices.count, group))
    if asked is not None:
        splits[asked.engine.split] = None
    planned = []
    for split in splits:
        if asked is not None and split == asked.engine.split:
            resolved = asked
        else:
            try:
                # --threads is meant for the split asked for.
                resolved = found.changed("another split", **_settings_of(split), threads=None).resolve(machine)
            except DoesNotFit:
                continue
        engine, ranks = resolved.engine, found.divide(split, group)
        tokens = engine.max_num_batched_tokens
        decode, prefill = (
            step_cost(found.spec, engine, ranks, *counts, shared=devices.shared) for counts in ((1, 1), (tokens, 0))
        )
        planned.append(PlannedSplit(resolved, decode, prefill, resolved is asked))
    return planned


def _settings_of(split: Split) -> dict[str, object]:
    return {
        "tensor_parallel_size": split.tensor,
        "pipeline_parallel_size": split.pipeline,
        "expert_parallel": split.expert,
    }


def _show_splits(console: Console, splits: list[PlannedSplit], devices: Devices) -> None:
    """Prints the memory and the steps of each split, in two tables so that they fit a terminal."""
    title = f"Splits on {devices}{', speeds assumed' if devices.shared else ''}"
    memory = _table(title, "weights", "KV cache", "KV tokens", "free")
    steps = _table("Their steps", "decode:\nmoved", "memory", "link", "prefill:\nmoved", "memory", "link")
    for planned in splits:
        tightest, engine = planned.resolved.memory, planned.resolved.engine
        rows = {row.name: format_bytes(row.bytes) for row in tightest.rows}
        name = f"{'* ' if planned.asked else ''}{planned.split}"
        memory.add_row(name, rows["weights"], rows["KV cache"], f"{tightest.kv_tokens:,}", rows["free"])
        figures = []
        for cost, tokens in ((planned.decode, 1), (planned.prefill, engine.max_num_batched_tokens)):
            figures += [format_bytes(cost.moved // tokens), *map(_duration, _seconds(cost, devices))]
        steps.add_row(name, *figures)
    memory.caption = "For the rank with the least to spare. *: the split asked for."
    steps.caption = (
        "Moved: bytes that the ranks exchange for one token. Memory, link: the least time for reading the weights and "
        "for the exchange. Decode: a step of one sequence. Prefill: a step of max_num_batched_tokens prompt tokens."
    )
    console.print(memory)
    console.print(steps)


def _show_types(console: Console, file: GgufFile) -> None:
    """Prints the types of a file's tensors."""
    table = Table(title=f"Types in {file.path.name}", title_justify="left")
    for heading in ("type", "tensors", "size", "bits per weight", "in a CPU's memory"):
        table.add_column(heading, justify="left" if heading == "type" else "right")
    for row in _types(file):
        bits = 8 * row["bytes"] / row["weights"]
        kept = GGUF_FORMATS.get(row["type"])
        memory = f"{kept.bits_per_weight:.4g} ({kept.bits_per_weight / bits:.2f}×)" if kept else "as --dtype"
        table.add_row(row["type"], f"{row['tensors']:,}", format_bytes(row["bytes"]), f"{bits:.4g}", memory)
    console.print(table)


def _types(file: GgufFile) -> list[dict[str, Any]]:
    """Returns the number of tensors, weights and bytes of each type, the largest first."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors.values():
        name = tensor.type.name
        row = rows.setdefault(name, {"type": name, "tensors": 0, "weights": 0, "bytes": 0})
        row["tensors"] += 1
        row["weights"] += prod(tensor.shape)
        row["bytes"] += tensor.size
    return sorted(rows.values(), key=lambda row: -int(row["bytes"]))


def _table(title: str, *figures: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("split", no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _seconds(cost: StepCost, devices: Devices) -> tuple[float, float]:
    """Returns the least seconds that memory and links take."""
    return cost.read / devices.bandwidth, cost.linked / devices.link


def _duration(seconds: float) -> str:
    """Returns a duration as text, such as '20.7 ms', '6.43 µs' or '0'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _as_json(found: FoundModel, resolved: Resolved, splits: list[PlannedSplit], devices: Devices) -> dict[str, Any]:
    return {
        "model": msgspec.to_builtins(model_facts(found.spec)),
        "hardware": msgspec.to_builtins(devices),
        "memory": _rows(resolved.memory.rows),
        "num_blocks": list(resolved.memory.num_blocks),
        "splits": [_split_json(found, planned, devices) for planned in splits],
        "settings": {name: {"value": value, "from": source} for name, (value, source) in resolved.provenance.items()},
    }


def _split_json(found: FoundModel, planned: PlannedSplit, devices: Devices) -> dict[str, Any]:
    engine = planned.resolved.engine
    costs = {"decode": (planned.decode, (1, 1)), "prefill": (planned.prefill, (engine.max_num_batched_tokens, 0))}
    steps = {}
    for name, (cost, counts) in costs.items():
        memory, link = _seconds(cost, devices)
        each = [step_traffic(found.spec, place, *counts, engine.element_size) for place in planned.split.places]
        steps[name] = {
            "tokens": counts[0],
            "read_bytes": cost.read,
            "moved_bytes": cost.moved,
            "memory_seconds": memory,
            "link_seconds": link,
            "moved_by_rank": msgspec.to_builtins(each),
        }
    return {
        **_settings_of(planned.split),
        "asked": planned.asked,
        "kv_tokens": planned.resolved.memory.kv_tokens,
        "memory_by_rank": [_rows(rank.rows) for rank in planned.resolved.ranks],
        **steps,
    }


def _rows(rows: Any) -> list[dict[str, Any]]:
    return [{"name": row.name, "bytes": row.bytes, "note": row.note} for row in rows]
