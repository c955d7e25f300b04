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
from penstock.simulate.planner import Demand, FleetCandidate, best_change, purchase, search, verify
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
        for place, candidate in enumerate(found[:verified]):
            say(f"simulating {_text(candidate)}")
            found[place] = verify(demand, candidate, prices)
        found.sort(key=lambda each: (each.hour, each.devices))
    best = found[0]
    change = best_change(demand, best, prices)
    bought = purchase(demand, found, prices)
    console = Console()
    _show(console, demand, found, prices)
    money = prices.currency
    console.print(f"First limit of {_text(best)}: {best.bottleneck}.", markup=False)
    if change is not None:
        console.print(f"One thing to change: {change.what}, for {change.hour:,.2f} {money} an hour.", markup=False)
    console.print(_advice(bought.fleet_day, bought.provider_day, bought.break_even, money), markup=False)
    console.print(
        f"Assumed: prices of {prices.date}; {demand.rate:g} requests/s at all hours; lengths with a log-normal "
        "spread of 0.6; machines alone, without people, networks and idle hours.",
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
    for heading in (f"{money}\nan hour", f"{money} per\n1M output", "TTFT\ns", "TPOT\nms", "within\nboth", "busy"):
        table.add_column(heading, justify="right")
    for each in found:
        within = "–"
        if each.attained is not None:
            within = f"{each.attained:.1%}\n{each.interval[0]:.1%}–{each.interval[1]:.1%}"
        table.add_row(
            _text(each),
            f"{each.hour:,.2f}",
            f"{_per_million(demand, each):,.3g}",
            f"{each.ttft:.3g}",
            f"{1e3 * each.tpot:.3g}",
            within,
            "–" if each.busy is None else f"{each.busy:.0%}",
        )
    table.caption = "TTFT and TPOT: estimated. Within both: simulated, with its 95% interval; –: not simulated."
    console.print(table)


def _text(each: FleetCandidate) -> str:
    """Returns a fleet for people: '3 x (2 H100, TP=2, fp8)'."""
    spec = each.replica
    size = spec.tensor * spec.pipeline
    split = [f"{name}={value}" for name, value in (("TP", spec.tensor), ("PP", spec.pipeline)) if value > 1]
    weights = "bf16" if spec.quantization == "none" else spec.quantization
    return f"{each.count} x ({', '.join([f'{size} {spec.device}' if size > 1 else spec.device, *split, weights])})"


def _per_million(demand: Demand, each: FleetCandidate) -> float:
    """Returns the cost of a million output tokens at the demand's rate."""
    return each.hour / (demand.rate * demand.output * 3600) * 1e6


def _advice(fleet: float, provider: float, even: float, money: str) -> str:
    verdict = "Buy from a provider" if provider < fleet else "Build"
    volume = "no volume that its smallest replica can serve" if math.isinf(even) else f"{even / 1e6:,.3g}M tokens a day"
    return (
        f"{verdict}: the fleet costs {fleet:,.0f} {money} a day, a provider {provider:,.0f} for the same tokens. One "
        f"replica costs as much as a provider from {volume} on."
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
