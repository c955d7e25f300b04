"""Real servers and their simulation on the same requests."""

import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from servers import free_port, running

from penstock.bench.online import first_model, run_load
from penstock.bench.timeline import Timeline
from penstock.bench.workload import LengthRange, WorkloadRequest, mixed, percentile
from penstock.schedule import read_events, replay
from penstock.simulate.build import build
from penstock.simulate.costs.fitted import FittedEngine
from penstock.simulate.prices import load_prices
from penstock.simulate.records import RequestRecord
from penstock.simulate.scenario import Scenario
from penstock.simulate.simulation import Simulation
from penstock.weights.packaged import SMOLLM2

SHARES = (0.5, 0.8, 0.95)  # of the capacity
VOCABULARY = 40_000
# The workloads to fit to, and to judge by: other lengths, other seeds.
FIT = (LengthRange(16, 600), LengthRange(4, 120))
JUDGE = (LengthRange(40, 320), LengthRange(24, 72))


def accuracy_figures(runs: int, requests: int) -> dict[str, Any]:
    """Returns means and 99th percentiles of TTFT and TPOT, real and simulated, for one and two replicas."""
    cases = [case for count in (1, 2) for case in _cases(count, runs, requests)]
    return {"prefix hits": _prefix_hits(requests), "cases": cases}


def _prefix_hits(requests: int) -> dict[str, int]:
    """Returns the prompt tokens that the prefix cache of a real server had, and those in its simulation, whose requests
    come from the server's event log. The log's plans are made again first, which fails if one differs."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "events"
        with _served(log, 2, "--enable-prefix-caching") as url:
            _ask([url], mixed(requests, *JUDGE, VOCABULARY, shared_prefix=200, rate=4.0, seed=8))
        events = list(read_events(log.read_bytes().splitlines(keepends=True)))
        plans = replay(events)
        cost = Path(folder) / "cost.json"
        cost.write_text(json.dumps(msgspec.to_builtins(FittedEngine.measure(log))))
        outcome = _simulation(log, cost, 1, 0.0).run()
        return {
            "plans made again": len(plans),
            "real": sum(new.num_computed for plan in plans for new in plan.new),
            "simulated": outcome.totals.prefix_hits,
            "looked up": outcome.totals.prefix_queries,
        }


def _cases(count: int, runs: int, requests: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        logs = [Path(folder) / f"events{i}" for i in range(count)]
        urls = [stack.enter_context(_served(log, 2 // count)) for log in logs]
        # Warm, then fit: a burst, and open loads below what the servers can do.
        burst = _ask(urls, mixed(40, *FIT, VOCABULARY, seed=1))
        capacity = len(burst) / max(line.stamps[-1][0] - burst[0].sent for line in burst)
        for seed, share in ((2, 0.3), (3, 0.6), (4, 0.9)):
            _ask(urls, mixed(requests, *FIT, VOCABULARY, rate=share * capacity, seed=seed))
        fitted = Path(folder) / "cost.json"
        fitted.write_text(json.dumps(msgspec.to_builtins(FittedEngine.measure(logs[0]))))
        judged = _ask(urls, mixed(40, *JUDGE, VOCABULARY, seed=5))
        capacity = len(judged) / max(line.stamps[-1][0] - judged[0].sent for line in judged)
        # What the way to the engine takes: the difference at a low load of the fitting workload.
        quiet = mixed(20, *FIT, VOCABULARY, rate=0.2 * capacity, seed=6)
        real = mean(line.ttft for line in _ask(urls, quiet))
        front = max(real - mean(each.ttft for each in _simulated(quiet, fitted, count, 0.0)), 0.0)
        return [_case(urls, fitted, front, count, share, capacity, runs, requests) for share in SHARES]


def _case(
    urls: Sequence[str], fitted: Path, front: float, count: int, share: float, capacity: float, runs: int, requests: int
) -> dict[str, Any]:
    items = mixed(requests, *JUDGE, VOCABULARY, rate=share * capacity, seed=round(100 * share))
    measured = [_real_figures(_ask(urls, items)) for _ in range(runs)]
    simulated = _figures([(each.ttft, each.tpot) for each in _simulated(items, fitted, count, front)])
    case: dict[str, Any] = {"replicas": count, "share": share, "rate": round(share * capacity, 3), "front_s": front}
    for name in simulated:
        values = [each[name] for each in measured]
        center = mean(values)
        spread = (max(values) - min(values)) / center
        error = simulated[name] / center - 1
        allowed = max(spread, 0.15 if name.endswith("p99") else 0.10)
        case[name] = {
            "real_ms": [round(1e3 * value, 2) for value in values],
            "simulated_ms": round(1e3 * simulated[name], 2),
            "error": round(error, 3),
            "spread": round(spread, 3),
            "within": abs(error) <= allowed,
        }
    return case


def _served(log: Path, threads: int, caching: str = "--no-enable-prefix-caching") -> Any:
    """A server of SmolLM2 that logs its events. Gives its address."""
    port = free_port()
    flags = ["--event-log", str(log), "--speculation", "off", "--threads", str(threads), caching]
    command = [sys.executable, "-m", "penstock", "serve", str(SMOLLM2.locate()), "--port", str(port), *flags]

    class Server(ExitStack):
        def __enter__(self) -> str:  # type: ignore[override]
            super().__enter__()
            self.enter_context(running(command, port))
            return f"http://127.0.0.1:{port}"

    return Server()


def _ask(urls: Sequence[str], items: Sequence[WorkloadRequest]) -> list[Timeline]:
    """Sends the items, to the servers in turn. Returns their timelines in the order of the items."""
    return asyncio.run(_ask_all(urls, items))


async def _ask_all(urls: Sequence[str], items: Sequence[WorkloadRequest]) -> list[Timeline]:
    name = await first_model(urls[0], None)
    parts = [run_load(url, name, items[place :: len(urls)]) for place, url in enumerate(urls)]
    answers = await asyncio.gather(*parts)
    lines: list[Timeline] = [Timeline(0.0)] * len(items)
    for place, (part, _) in enumerate(answers):
        lines[place :: len(urls)] = part
    failed = next((line.error for line in lines if line.error), "")
    if failed:
        raise ValueError(f"a request failed: {failed}")
    return lines


def _simulated(items: Sequence[WorkloadRequest], fitted: Path, count: int, front: float) -> list[RequestRecord]:
    trace = fitted.with_name("trace.json")
    fields = {
        "input_lens": [len(item.prompt_ids) for item in items],
        "output_lens": [item.output_len for item in items],
        "start_times": [item.arrival for item in items],
    }
    trace.write_text(json.dumps(fields))
    return _simulation(trace, fitted, count, front).run().requests


def _simulation(trace: Path, fitted: Path, count: int, front: float) -> Simulation:
    scenario = msgspec.convert(
        {
            "title": "accuracy",
            "duration": 0,
            "router": "round_robin",
            "front_seconds": front,
            "traffic": {"load": {"name": "load", "trace": {"file": str(trace)}}},
            "replicas": {"engine": {"cost": str(fitted), "count": count}},
        },
        Scenario,
    )
    return build(scenario, load_prices(), fitted.parent)


def _real_figures(lines: Sequence[Timeline]) -> dict[str, float]:
    return _figures([(line.ttft, line.tpot) for line in lines])


def _figures(times: Sequence[tuple[float, float]]) -> dict[str, float]:
    ttft, tpot = zip(*times, strict=True)
    return {
        "ttft_mean": mean(ttft),
        "tpot_mean": mean(tpot),
        "ttft_p99": percentile(ttft, 0.99),
        "tpot_p99": percentile(tpot, 0.99),
    }
