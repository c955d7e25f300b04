"""Implements `penstock plan fleet`: which machines, how many, and what they cost."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.output import write_file
from penstock.observe.reporting import reporting
from penstock.prepare.files import check_file
from penstock.simulate.costs.devices import find_device
from penstock.simulate.planner import (
    SIGMA,
    Demand,
    FleetCandidate,
    Purchase,
    best_change,
    purchase,
    search,
    verify_cheapest,
)
from penstock.simulate.prices import BOOK, PriceBook, load_prices


def plan_fleet(
    demand: Demand, devices: list[str], prices_file: str | None, verified: int, json_file: str | None
) -> None:
    """Prints the cheapest fleets, and whether to buy instead. `verified` of them are simulated.

    Raises ValueError for a device or model that is not known, and if no fleet serves the demand.
    """
    check_file("--json", json_file)
    prices = load_prices(BOOK if prices_file is None else Path(prices_file))
    try:
        names = [find_device(name).name for name in devices]
    except ValueError as error:
        raise ValueError(f"--device: {error}") from None
    names = names or [name for name in prices.devices if find_device(name)]
    with reporting("searching fleets") as say:
        found = search(demand, prices, names)
        found = verify_cheapest(demand, found, prices, verified, lambda each: say(f"simulating {_text(each)}"))
    best = found[0]
    change = best_change(demand, best, prices)
    bought = purchase(demand, found, prices)
    console = Console()
    _show(console, demand, found, prices)
    money = prices.currency
    console.print(f"Each replica of {_text(best)}: {_command(best)}", markup=False, soft_wrap=True)
    console.print(f"First limit: {best.bottleneck}.", markup=False)
    if change is not None:
        console.print(f"One thing to change: {change.what}, for {change.hour:,.2f} {money} an hour.", markup=False)
    console.print(_advice(bought, money), markup=False)
    console.print(
        f"Assumed: prices of {prices.date}, a provider's {bought.price.input:g} and {bought.price.output:g} {money} "
        f"for 1M prompt and output tokens; {demand.rate:g} requests/s at all hours; lengths with a log-normal spread "
        f"of {SIGMA:g}; machines alone, without people, networks, idle hours and machines to spare.",
        markup=False,
    )
    report: dict[str, Any] = {
        "demand": msgspec.to_builtins(demand),
        "prices": {"date": prices.date, "currency": money},
        "fleets": [_figures(demand, each) for each in found],
        "change": msgspec.to_builtins(change),
        "purchase": {**msgspec.to_builtins(bought), "break_even": _finite(bought.break_even)},
    }
    write_file("--json", json_file, json.dumps(report, indent=1) + "\n")


def _show(console: Console, demand: Demand, found: list[FleetCandidate], prices: PriceBook) -> None:
    title = (
        f"{demand.rate:g} requests/s of {demand.model}, {demand.prompt} + {demand.output} tokens; "
        f"{demand.share:.0%} within {demand.ttft:g} s to the first token and {1e3 * demand.tpot:g} ms for each further"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("fleet", no_wrap=True)
    money = prices.currency
    for heading in (f"{money}\nan hour", f"{money} per\n1M output", "TTFT\ns", "TPOT\nms", "within\nboth", "load"):
        table.add_column(heading, justify="right")
    shown: set[str] = set()
    for each in found:
        within = "–"
        if each.attained is not None:
            within = f"{each.attained:.1%}\n{100 * each.interval[0]:.3g}–{100 * each.interval[1]:.3g}%"
        elif each.replica.device in shown:
            continue
        shown.add(each.replica.device)
        table.add_row(
            _text(each),
            f"{each.hour:,.2f}",
            _rounded(_per_million(demand, each)),
            f"{each.ttft:.3g}",
            f"{1e3 * each.tpot:.3g}",
            within,
            f"{each.load:.0%}",
        )
    console.print(table)
    console.print(
        f"TTFT and TPOT: estimated, for {demand.share:.0%}. Within both: simulated, with its 95% interval; –: not "
        "simulated. Load: of what a replica can take within the targets. Of a device, the cheapest fleet is shown; "
        "--json has all.",
        markup=False,
    )


def _text(each: FleetCandidate) -> str:
    """Returns a fleet for people: '3 x 2 H100, TP=2, fp8'."""
    spec = each.replica
    size = spec.tensor * spec.pipeline
    split = [f"{name}={value}" for name, value in (("TP", spec.tensor), ("PP", spec.pipeline)) if value > 1]
    weights = "bf16" if spec.quantization == "none" else spec.quantization
    return f"{each.count} x {', '.join([f'{size} {spec.device}' if size > 1 else spec.device, *split, weights])}"


def _per_million(demand: Demand, each: FleetCandidate) -> float:
    """Returns the cost of a million output tokens at the demand's rate."""
    return each.hour / (demand.rate * demand.output * 3600) * 1e6


def _command(each: FleetCandidate) -> str:
    """Returns the command that serves a replica with the settings of the plan."""
    spec = each.replica
    flags = {
        "--tensor-parallel-size": spec.tensor if spec.tensor > 1 else "",
        "--pipeline-parallel-size": spec.pipeline if spec.pipeline > 1 else "",
        "--quantization": "" if spec.quantization == "none" else spec.quantization,
        "--kv-cache-dtype": "" if spec.kv_cache == "auto" else spec.kv_cache,
        "--max-model-len": spec.max_model_len,
        "--max-num-batched-tokens": spec.max_num_batched_tokens,
        "--target-itl": f"{spec.target_step_ms:g}",
    }
    return " ".join(["penstock serve MODEL", *(f"{name} {value}" for name, value in flags.items() if value)])


def _rounded(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _advice(bought: Purchase, money: str) -> str:
    verdict = "Buy from a provider" if bought.provider_day < bought.fleet_day else "Build"
    fleet, provider, tokens = (
        _rounded(each) for each in (bought.fleet_day, bought.provider_day, bought.tokens_day / 1e6)
    )
    even = "No replica costs as little as a provider at any volume that it can serve."
    if math.isfinite(bought.break_even):
        even = f"One replica costs as much as a provider from {_rounded(bought.break_even / 1e6)}M tokens a day on."
    return (
        f"{verdict}: the fleet costs {fleet} {money} a day, a provider {provider} for the same {tokens}M tokens. {even}"
    )


def _figures(demand: Demand, each: FleetCandidate) -> dict[str, Any]:
    return {
        **{name: value for name, value in asdict(each).items() if name != "replica"},
        "replica": msgspec.to_builtins(each.replica),
        "cost_per_million_output_tokens": _per_million(demand, each),
        "text": _text(each),
    }


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value
