"""The memory that a checkpoint in floats needs with each quantisation, side by side."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.cli.output import duration
from penstock.config import ConfigError, DoesNotFit, Hardware, format_bytes
from penstock.config.machine.devices import Devices
from penstock.families import CannotSplit
from penstock.families.step_cost import step_cost
from penstock.kernels.native.loader import instruction_sets
from penstock.prepare.model import FoundModel

WEIGHTS = {"cpu": ("none", "int8", "int4"), "cuda": ("none", "fp8", "int8", "int4")}
PAGES = {"cpu": ("auto", "int8"), "cuda": ("auto", "fp8")}


@dataclass(frozen=True)
class Choice:
    """Holds what a quantisation needs on the rank with the least free memory; `why_not` if it cannot run."""

    weights: str  # --quantization
    pages: str  # --kv-cache-dtype
    asked: bool
    dtype: str = ""  # of the floats that are left
    weights_bytes: int = 0
    kv_tokens: int = 0
    read: int = 0  # bytes of weights that a decode step of one sequence reads
    why_not: str = ""


def choices(found: FoundModel, machine: Hardware, devices: Devices) -> list[Choice]:
    """Returns every combination of weights and KV cache. The list is empty if the checkpoint is quantised already, if
    transformers' code executes the model, or if this machine has no kernels for quantised weights."""
    if found.spec.transformers is not None or any(any(parameter.stored) for parameter in found.spec.parameters):
        return []
    if machine.device == "cpu" and not instruction_sets():
        return []
    settings = found.given.settings
    asked = (settings.quantization or "none", settings.kv_cache_dtype or "auto")
    pairs = [(weights, pages) for pages in PAGES[machine.device] for weights in WEIGHTS[machine.device]]
    return [_choice(found, machine, devices, *pair, asked=pair == asked) for pair in pairs]


def _choice(found: FoundModel, machine: Hardware, devices: Devices, weights: str, pages: str, *, asked: bool) -> Choice:
    group = found.given.settings.quantization_group if weights == "int4" else None
    changes = {"quantization": weights, "quantization_group": group, "kv_cache_dtype": pages}
    try:
        resolved = found.changed("to compare", **changes).resolve(machine)
    except (DoesNotFit, ConfigError, CannotSplit) as error:  # fp8 on an older GPU, int4 in rows that ranks would cut
        why = "does not fit" if isinstance(error, DoesNotFit) else "not supported"
        return Choice(weights, pages, asked, why_not=why)
    engine, tightest = resolved.engine, resolved.memory
    ranks = found.divide(engine.split, engine.quantization_group if weights == "int4" else 1)
    cost = step_cost(found.spec, engine, ranks, 1, 1, shared=devices.shared)
    stored = next(row.bytes for row in tightest.rows if row.name == "weights")
    return Choice(weights, pages, asked, engine.dtype, stored, tightest.kv_tokens, cost.read)


def show_choices(console: Console, rows: list[Choice], devices: Devices) -> None:
    """Prints the choices: a line for each quantisation of the weights."""
    if not rows:
        return
    table = Table(title="Quantisation", title_justify="left", caption_justify="left")
    table.add_column("weights", no_wrap=True)
    pages = list(dict.fromkeys(row.pages for row in rows))
    dtype = next((row.dtype for row in rows if row.dtype), "")
    kept = [f"KV tokens,\n{dtype if name == 'auto' else name}" for name in pages]
    for heading in ("size", *kept, "read for\na token", "at least"):
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(row.weights for row in rows):
        mine = [row for row in rows if row.weights == name]
        star = "* " if any(row.asked for row in mine) else ""
        fits = next((row for row in mine if not row.why_not), None)
        figures = ["–", "–", "–"]
        if fits is not None:
            figures = [
                format_bytes(fits.weights_bytes),
                format_bytes(fits.read),
                duration(fits.read / devices.bandwidth),
            ]
        tokens = [row.why_not or f"{row.kv_tokens:,}" for row in mine]
        table.add_row(f"{star}{dtype if name == 'none' else name}", figures[0], *tokens, *figures[1:])
    table.caption = (
        "The rank with the least to spare. Read: weights for one token of one sequence, and the time of that at "
        f"{devices.bandwidth / 1e9:.4g} GB/s. *: in the settings. Choose with --quantization and --kv-cache-dtype."
    )
    console.print(table)


def choice_json(row: Choice, devices: Devices) -> dict[str, Any]:
    return {
        "quantization": row.weights,
        "kv_cache_dtype": row.pages,
        "asked": row.asked,
        "why_not": row.why_not or None,
        "weights_bytes": row.weights_bytes,
        "kv_tokens": row.kv_tokens,
        "decode_read_bytes": row.read,
        "decode_seconds": row.read / devices.bandwidth,
    }
