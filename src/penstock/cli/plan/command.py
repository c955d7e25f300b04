"""Shows a model's memory, its quantisations and splits, and every setting. Loads neither weights nor torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.memory_table import memory_table
from penstock.cli.models.facts import LocalModelFacts
from penstock.cli.options import Flags
from penstock.cli.output import write_json
from penstock.cli.plan.bandwidth import read_bandwidth
from penstock.cli.plan.choices import Choice, choice_json, choices, show_choices
from penstock.cli.plan.repository import plan_repository
from penstock.cli.plan.splits import PlannedSplit, fitting_splits, memory_rows, show_splits, split_json
from penstock.config import DoesNotFit, Hardware, ModelFacts, Resolved, Split, detect_hardware, format_bytes
from penstock.config.machine.devices import Devices, parse_devices, this_machine, with_link
from penstock.config.memory import states_bytes
from penstock.config.weights import weights_bytes
from penstock.families import model_facts
from penstock.prepare.checks import check_start
from penstock.prepare.device import detect_device
from penstock.prepare.files import check_file
from penstock.prepare.model import FoundModel, find_given, read_given
from penstock.text import Tokenizer


def plan(model: str | None, hardware: str | None, link: str | None, json_file: str | None, flags: Flags) -> None:
    """Prints the plan. Raises what `penstock serve` raises before it starts an engine. With `hardware`, which may be
    another machine, the weights and this machine's kernels are not checked.
    """
    check_file("--json", json_file)
    given = read_given(model, flags)
    if given.settings.repository and hardware is None:
        own = plan_repository(given, flags, json_file)
        if own is not None:
            _show_settings(Console(), own)
        return
    found = find_given(given, weights=False)
    machine, devices = _devices(found, hardware, link)
    console = Console()
    options = choices(found, machine, devices)
    resolved = _resolve(found, machine, devices, options, console)
    if hardware is None:
        check_start(found, resolved, machine, weights=not _has_only_config(found.path))
        found.generation_defaults()
        Tokenizer.load(found.path)
    elif not devices.shared and len(resolved.ranks) > devices.count:
        raise ValueError(
            f"{resolved.engine.split} takes {len(resolved.ranks)} ranks, but {devices.name} has {devices.count}: set "
            "--hardware with more devices, or fewer ranks"
        )
    types = _types(found)
    splits = fitting_splits(found, machine, devices, resolved)
    _show_settings(console, resolved)
    _show(console, found, resolved, types)  # after the long table, so that a terminal still shows it at the end
    show_choices(console, options, devices)
    show_splits(console, splits, devices)
    if json_file is not None:
        figures = _as_json(found, resolved, splits, options, devices)
        if types is not None:
            rows = [vars(row) for row in types.types]
            figures |= {"types": rows, "weights_in_memory": _memory_of_weights(found, resolved)}
        write_json(json_file, figures)


def _resolve(
    found: FoundModel, machine: Hardware, devices: Devices, options: list[Choice], console: Console
) -> Resolved:
    """Resolves the settings. If the model does not fit, prints the quantisations and splits that do before it raises
    DoesNotFit."""
    try:
        return found.resolve(machine)
    except DoesNotFit as error:
        others = []
        if any(not option.why_not for option in options):
            show_choices(console, options, devices)
            others.append("quantisations")
        if splits := fitting_splits(found, machine, devices, None):
            show_splits(console, splits, devices)
            others.append("splits")
        if not others:
            raise
        raise DoesNotFit(f"{error}, or one of the {' or '.join(others)} above") from None


def _has_only_config(path: Path) -> bool:
    """True for a model of the hub whose weights have not been downloaded: `plan` does not need them."""
    return path.parent.name == "snapshots" and not any(path.glob("*.safetensors"))


def _show(console: Console, found: FoundModel, resolved: Resolved, types: LocalModelFacts | None) -> None:
    facts = model_facts(found.spec)
    console.print(
        f"{resolved.engine.name}: {facts.family}, {facts.num_parameters / 1e6:,.1f} M parameters, "
        f"{facts.num_layers} layers, context {facts.max_position:,}",
        markup=False,
    )
    if facts.transformers:
        console.print(
            f"transformers' code executes {facts.transformers}, with Penstock's attention: slower than the models that "
            "penstock models lists. The start compares its results with transformers' own.",
            markup=False,
        )
    if facts.state_elements:
        each = format_bytes(states_bytes(facts, 1))
        console.print(
            f"Layers keep states: a sequence has {each} for itself. So there is no prefix cache, no speculation, and "
            "one rank on a CPU.",
            markup=False,
        )
    if types is not None:
        _show_types(console, types, _memory_of_weights(found, resolved))
    console.print(memory_table(resolved))


def _show_settings(console: Console, resolved: Resolved) -> None:
    table = Table(title="Settings", title_justify="left")
    for heading in ("setting", "value", "from"):  # one long value must not make every source take two lines
        table.add_column(heading, overflow="fold", max_width=28 if heading == "value" else None)
    for name, (value, source) in resolved.provenance.items():
        table.add_row(name, _text(value), source)
    console.print(table)


def _devices(found: FoundModel, hardware: str | None, link: str | None) -> tuple[Hardware, Devices]:
    """Returns the hardware to plan for, in two forms: for the settings, and for the cost of splits.

    Figures in --hardware are a CPU's unless --device is cuda.
    """
    asked = found.given.settings.device
    if hardware is None:
        here = detect_device(asked)
        devices = this_machine(here)
        if here.device == "cpu":
            devices = replace(devices, bandwidth=read_bandwidth())
    else:
        here = detect_hardware()
        devices = parse_devices(hardware, "cuda" if asked == "cuda" else "cpu")
    devices = with_link(devices, link)
    return devices.machine(here), devices


def _memory_of_weights(found: FoundModel, resolved: Resolved) -> int:
    """Returns the bytes that the weights of the whole model take in memory."""
    (facts,) = found.divide(Split(), 1)
    return weights_bytes(facts, resolved.engine)


def _types(found: FoundModel) -> LocalModelFacts | None:
    """The types of tensors, if the model's matrices are quantised and its files are here."""
    here = found.path.is_file() or any(found.path.glob("*.safetensors"))
    return LocalModelFacts(found.path) if here and found.spec.scheme is not None else None


def _show_types(console: Console, facts: LocalModelFacts, memory: int) -> None:
    """Prints the types of a model's tensors. `memory`: bytes of all weights in memory."""
    table = Table(title=f"Types in {facts.path.name}", title_justify="left")
    for heading in ("type", "tensors", "size", "bits per weight", "in a CPU's memory"):
        table.add_column(heading, justify="left" if heading == "type" else "right")
    for row in facts.types:
        kept = facts.formats.get(row.type)
        held = f"{kept.bits_per_weight:.4g} bits ({kept.bits_per_weight / row.bits:.2f}×)" if kept else "as --dtype"
        table.add_row(row.type, f"{row.tensors:,}", format_bytes(row.bytes), f"{row.bits:.4g}", held)
    console.print(table)
    size = sum(row.bytes for row in facts.types)
    console.print(
        f"All weights: {format_bytes(size)} in the file, {format_bytes(memory)} in memory ({memory / size:.2f}×)"
    )


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _as_json(
    found: FoundModel, resolved: Resolved, splits: list[PlannedSplit], options: list[Choice], devices: Devices
) -> dict[str, Any]:
    return {
        "model": _facts_json(model_facts(found.spec)),
        "hardware": msgspec.to_builtins(devices),
        "memory": memory_rows(resolved.memory.rows),
        "num_blocks": list(resolved.memory.num_blocks),
        "quantizations": [choice_json(option, devices) for option in options],
        "splits": [split_json(found, planned, devices) for planned in splits],
        "settings": {name: {"value": value, "from": source} for name, (value, source) in resolved.provenance.items()},
    }


def _facts_json(facts: ModelFacts) -> dict[str, Any]:
    """Returns the sizes of a model. Codes are called as in the file, and floats ""."""
    fields: dict[str, Any] = msgspec.to_builtins(facts)
    for matrix in fields["matrices"]:
        matrix["stored"] = ["" if codes is None else codes["name"] for codes in matrix["stored"]]
    return fields
