"""Runs scenarios, and shows their figures beside each other."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.cli.output import write_file
from penstock.cli.simulate.page import page_of
from penstock.observe.progress import progress_bar
from penstock.prepare.files import check_file
from penstock.simulate.build import build
from penstock.simulate.claims import Verdict, judge
from penstock.simulate.costs.fitted import FittedEngine
from penstock.simulate.figures import figures_of, series_of
from penstock.simulate.prices import BOOK, PriceBook, load_prices
from penstock.simulate.records import Outcome
from penstock.simulate.scenario import READY, Scenario, ScenarioFile, load_scenario, ready_scenarios

# The figures of the table on the terminal. --json has all.
SHOWN = (
    *("requests", "done", "refused", "late", "failed", "open", "moves"),
    *("throughput_rps", "output_tokens_per_s"),
    *(
        "inference_latency_ms_p50",
        "inference_latency_ms_p99",
        "ttft_ms_p50",
        "ttft_ms_p99",
        "tpot_ms_p50",
        "tpot_ms_p99",
    ),
    *("attained_pct", "batch_utilization_pct", "gpu_utilization_pct", "kv_held_pct_max", "kv_filled_pct"),
    *("prefix_hit_pct", "preemptions", "device_hours", "cost", "cost_per_million_output_tokens"),
)
QUIET = ("refused", "late", "failed", "open", "moves", "preemptions")  # left out if they are 0 everywhere
TIMELINE = 20  # lines on the terminal


def simulate(
    name: str,
    changes: Mapping[str, Any],
    trace: str | None,
    price_file: str | None,
    json_file: str | None,
    html_file: str | None,
) -> None:
    """Runs a scenario's variants in turn, and prints their figures. Raises ValueError for a wrong scenario."""
    check_file("--json", json_file)
    check_file("--html", html_file)
    file = load(name, changes, trace)
    prices = load_prices(BOOK if price_file is None else Path(price_file))
    results = {variant: run(scenario, prices, file.folder, variant) for variant, scenario in file.variants.items()}
    figures = {variant: result["figures"] for variant, result in results.items()}
    verdicts = [judge(claim, figures) for claim in file.claims]
    console = Console()
    console.print(file.title, style="bold", markup=False)
    if file.about:
        console.print(file.about.strip(), markup=False)
    _show_figures(console, figures)
    for variant, result in results.items():
        _show_timeline(console, variant, result["timeline"])
    _show_verdicts(console, verdicts)
    report = report_of(file, prices, results, verdicts)
    write_file("--json", json_file, json.dumps(report, indent=1) + "\n")
    if html_file is not None:
        write_file("--html", html_file, page_of(report))


def run(scenario: Scenario, prices: PriceBook, folder: Path, variant: str) -> dict[str, Any]:
    """Runs one variant with a progress bar. Returns its figures, series and timeline."""
    simulation = build(scenario, prices, folder)
    whole = scenario.duration + scenario.drain if scenario.duration else 0.0
    done = 0.0

    def advance(seconds: float) -> None:
        nonlocal done
        step(round((seconds - done) * 10))
        done = seconds

    title = f"simulating {variant}" if variant else "simulating"
    with progress_bar(f"{title}, tenths of a second", round((scenario.duration or whole) * 10), wanted=True) as step:
        return result_of(simulation.run(advance), scenario)


def result_of(outcome: Outcome, scenario: Scenario) -> dict[str, Any]:
    """Returns the figures, series and timeline of a run, also of one that goes on."""
    return {"figures": figures_of(outcome, scenario.slo), "series": series_of(outcome), "timeline": outcome.timeline}


def report_of(
    file: ScenarioFile, prices: PriceBook, results: Mapping[str, Any], verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    """Returns what --json writes, and the page shows."""
    return {
        "scenario": file.name,
        "title": file.title,
        "about": file.about,
        "seed": next(iter(file.variants.values())).seed,
        "prices": {"date": prices.date, "currency": prices.currency},
        "claims": [{**msgspec.to_builtins(verdict), "text": verdict.text} for verdict in verdicts],
        "variants": results,
    }


def list_scenarios() -> None:
    """Prints the ready scenarios."""
    table = Table(show_header=False, box=None)
    for name in ready_scenarios():
        table.add_row(name, load_scenario(name).title)
    Console().print(table)


def show_scenario(name: str) -> None:
    """Prints the file of a ready scenario. Raises ValueError for another name."""
    if name not in ready_scenarios():
        raise ValueError(f"--show {name!r} is no ready scenario: name one of {', '.join(ready_scenarios())}")
    print((READY / f"{name}.yaml").read_text(), end="")


def fit_logs(logs: Sequence[str], json_file: str | None) -> None:
    """Fits the cost of steps to event logs, and writes it. Raises ValueError for a wrong log."""
    if json_file is None:
        raise ValueError("--fit needs --json FILE, where the cost of steps is written")
    check_file("--json", json_file)
    fitted = FittedEngine.measure([Path(log) for log in logs])
    write_file("--json", json_file, json.dumps(msgspec.to_builtins(fitted), indent=1) + "\n")
    print(f"{json_file}: name it as `cost` of replicas in a scenario")


def load(name: str, changes: Mapping[str, Any], trace_file: str | None) -> ScenarioFile:
    """Returns the scenario, with another file for its traces if one is given. Raises ValueError."""
    file = load_scenario(name, changes)
    if trace_file is None:
        return file
    trace, variants = Path(trace_file), {}
    for name, scenario in file.variants.items():
        traffic = {
            key: msgspec.structs.replace(spec, trace=msgspec.structs.replace(spec.trace, file=str(trace.absolute())))
            for key, spec in scenario.traffic.items()
            if spec.trace is not None
        }
        if not traffic:
            raise ValueError(f"--trace {str(trace)!r}: the scenario {file.name} has no trace to replace")
        if trace.is_dir() or not trace.exists():
            raise ValueError(f"--trace {str(trace)!r} cannot be read: there is no such file; name another one")
        variants[name] = msgspec.structs.replace(scenario, traffic={**scenario.traffic, **traffic})
    return msgspec.structs.replace(file, variants=variants)


def _show_figures(console: Console, figures: Mapping[str, Mapping[str, float | None]]) -> None:
    table = Table()
    table.add_column("")
    for variant in figures:
        table.add_column(variant or "value", justify="right")
    own = [name for name in next(iter(figures.values())) if name.endswith((".throughput_rps", ".ttft_ms_p99"))]
    for name in (*SHOWN, *own):
        values = [each.get(name) for each in figures.values()]
        if (name in QUIET and not any(values)) or all(value is None for value in values):
            continue
        table.add_row(name, *map(_number, values))
    console.print(table)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _show_timeline(console: Console, variant: str, timeline: list[tuple[float, str]]) -> None:
    if not timeline:
        return
    console.print(f"Timeline{' of ' + variant if variant else ''}", style="bold", markup=False)
    for at, what in timeline[:TIMELINE]:
        console.print(f"{at:10.1f} s  {what}", markup=False)
    if len(timeline) > TIMELINE:
        console.print(f"             and {len(timeline) - TIMELINE} more: --json or --html has all")


def _show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    if not verdicts:
        return
    title = "What is said, and what this run shows"
    table = Table("said", "here", "holds", "note", title=title, title_justify="left")
    for verdict in verdicts:
        table.add_row(verdict.claim.says, verdict.text, "yes" if verdict.holds else "no", verdict.claim.note)
    console.print(table)
