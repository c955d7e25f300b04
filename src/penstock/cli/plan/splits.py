"""The splits of a model among ranks that fit in memory, and what a step of each costs."""

from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.output import duration
from penstock.config import DoesNotFit, Hardware, Resolved, Split, format_bytes
from penstock.config.machine.devices import Devices
from penstock.declared.settings import DEFAULTS
from penstock.families.shard import possible_splits
from penstock.families.step_cost import StepCost, step_cost
from penstock.families.traffic import step_traffic
from penstock.prepare.model import FoundModel

# Settings that are left out for all splits but the one that the settings name. The number of threads was chosen for
# that split. A number of speculative tokens is an error where speculation is off, as it is by default with pipeline
# stages. A disk tier is for one rank.
ONE_SPLIT_ONLY = {
    "threads": None,
    "num_speculative_tokens": None,
    **dict.fromkeys(("kv_disk", "kv_host", "prefill_replicas")),
}


@dataclass(frozen=True)
class PlannedSplit:
    """Holds a split that fits in memory, and the cost of its steps."""

    resolved: Resolved
    decode: StepCost  # a step of one sequence
    prefill: StepCost  # a step of max_num_batched_tokens tokens of prompts
    asked: bool  # the split that the settings name

    @property
    def split(self) -> Split:
        return self.resolved.engine.split


def fitting_splits(
    found: FoundModel, machine: Hardware, devices: Devices, asked: Resolved | None
) -> list[PlannedSplit]:
    """Returns the possible splits that fit in memory, and the split that the settings name."""
    settings = found.given.settings
    group = (settings.quantization_group or DEFAULTS["quantization_group"]) if settings.quantization == "int4" else 1
    splits = dict.fromkeys(possible_splits(found.spec, devices.count, group))
    if asked is not None:
        splits[asked.engine.split] = None
    planned = []
    for split in splits:
        if asked is not None and split == asked.engine.split:
            resolved = asked
        else:
            try:
                resolved = found.changed("another split", **_settings_of(split), **ONE_SPLIT_ONLY).resolve(machine)
            except DoesNotFit:
                continue
        engine, ranks = resolved.engine, found.divide(split, group)
        tokens = engine.max_num_batched_tokens
        decode, prefill = (
            step_cost(found.spec, engine, ranks, *counts, shared=devices.shared) for counts in ((1, 1), (tokens, 0))
        )
        planned.append(PlannedSplit(resolved, decode, prefill, resolved is asked))
    return planned


def show_splits(console: Console, splits: list[PlannedSplit], devices: Devices) -> None:
    """Prints the memory and the steps of each split, in two tables so that they fit a terminal."""
    title = f"Splits on {devices}{', link assumed' if devices.shared else ''}"
    memory = _table(title, "weights", "KV cache", "KV tokens", "free")
    steps = _table("Their steps", "decode:\nmoved", "memory", "link", "prefill:\nmoved", "memory", "link")
    for planned in splits:
        tightest, engine = planned.resolved.memory, planned.resolved.engine
        rows = {row.name: format_bytes(row.bytes) for row in tightest.rows}
        name = f"{'* ' if planned.asked else ''}{planned.split}"
        memory.add_row(name, rows["weights"], rows["KV cache"], f"{tightest.kv_tokens:,}", rows["free"])
        figures = []
        for cost, tokens in ((planned.decode, 1), (planned.prefill, engine.max_num_batched_tokens)):
            figures += [format_bytes(cost.moved // tokens), *map(duration, _seconds(cost, devices))]
        steps.add_row(name, *figures)
    memory.caption = "For the rank with the least to spare. *: the split in the settings."
    steps.caption = (
        "Moved: bytes that the ranks exchange for one token. Memory, link: the least time for reading the weights and "
        "for the exchange. Decode: a step of one sequence. Prefill: a step of max_num_batched_tokens prompt tokens."
    )
    console.print(memory)
    console.print(steps)


def split_json(found: FoundModel, planned: PlannedSplit, devices: Devices) -> dict[str, Any]:
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
        "memory_by_rank": [memory_rows(rank.rows) for rank in planned.resolved.ranks],
        **steps,
    }


def memory_rows(rows: Any) -> list[dict[str, Any]]:
    """Returns the rows of a memory table for --json."""
    return [{"name": row.name, "bytes": row.bytes, "note": row.note} for row in rows]


def _settings_of(split: Split) -> dict[str, object]:
    return {
        "tensor_parallel_size": split.tensor,
        "pipeline_parallel_size": split.pipeline,
        "expert_parallel": split.expert,
    }


def _table(title: str, *figures: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("split", no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _seconds(cost: StepCost, devices: Devices) -> tuple[float, float]:
    """Returns the least seconds that memory and links take."""
    return cost.read / devices.bandwidth, cost.linked / devices.link
