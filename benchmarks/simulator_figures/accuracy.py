"""Real servers and their simulation on the same requests, in rounds whose answers and event logs a folder keeps."""

import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import numpy as np
from calm import Watch
from servers import free_port, running

from penstock.bench.online import first_model, run_load
from penstock.bench.timeline import Timeline
from penstock.bench.workload import LengthRange, WorkloadRequest, mixed, percentile
from penstock.schedule import read_events, replay
from penstock.schedule.log import Added, Event, Started
from penstock.simulate.build import build
from penstock.simulate.costs.fitted import FittedEngine, MeasuredStep, fit, measured_steps
from penstock.simulate.prices import load_prices
from penstock.simulate.records import RequestRecord
from penstock.simulate.scenario import Scenario
from penstock.simulate.simulation import Simulation
from penstock.weights.packaged import SMOLLM2

COUNTS = (1, 2)  # replicas
SHARES = (0.5, 0.8, 0.95)  # of the capacity
VOCABULARY = 40_000
# The workloads to fit to, and to judge by: other lengths, other seeds.
FIT = (LengthRange(16, 600), LengthRange(4, 120))
JUDGE = (LengthRange(40, 320), LengthRange(24, 72))
WARM, BURST = 16, 32  # requests
FIT_LOADS = ((0.3, 16), (0.9, 32))  # shares of the capacity, and requests


class Rates(msgspec.Struct):
    """Requests a second that the servers can do, of both workloads. Measured once, so that all rounds are alike."""

    fit: float
    judge: float


class Times(msgspec.Struct):
    """TTFT and TPOT of the requests of a load, in their order."""

    ttft: list[float]
    tpot: list[float]


class Round(msgspec.Struct):
    """The answers of real servers in one round."""

    fitted: list[Times]  # for each load of FIT_LOADS
    judged: dict[str, Times]  # by share
    fitted_requests: int  # that each server got before those to judge by
    seconds: float
    calm: float | None


def accuracy_figures(folder: Path, runs: int, requests: int, seconds: float) -> dict[str, Any]:
    """Returns means and 99th percentiles of TTFT and TPOT, real and simulated, for one and two replicas.

    Rounds that `folder` lacks are run first, as many as `seconds` suffice for.
    """
    folder.mkdir(exist_ok=True)
    end, longest, watch = time.monotonic() + seconds, 0.0, Watch()
    if not (folder / "prefix").exists() and seconds:
        _run_prefixes(folder)
    for place in range(runs):
        for count in COUNTS:
            if (folder / f"{count}-{place}.json").exists():
                continue
            if time.monotonic() + 1.1 * longest > end:
                break
            began = time.monotonic()
            _run_round(folder, count, place, requests, watch)
            longest = max(longest, time.monotonic() - began)
    return {
        "prefix hits": _prefix_hits(folder),
        "cases": [case for count in COUNTS for case in _cases(folder, count, runs, requests)],
    }


# -- real servers -----------------------------------------------------------------------------------------------------


def _run_round(folder: Path, count: int, place: int, requests: int, watch: Watch) -> None:
    began, rates_file = time.perf_counter(), folder / f"{count}-rates.json"
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        logs = [Path(made) / f"{count}-{place}-{i}.events" for i in range(count)]
        urls = [stack.enter_context(_served(log, 2 // count)) for log in logs]
        asked = WARM
        _ask(urls, mixed(WARM, *FIT, VOCABULARY, seed=1))
        if rates_file.exists():
            rates = msgspec.json.decode(rates_file.read_bytes(), type=Rates)
        else:
            rates = Rates(*(_capacity(urls, mixed(BURST, *each, VOCABULARY, seed=2)) for each in (FIT, JUDGE)))
            rates_file.write_bytes(msgspec.json.encode(rates))
            asked += 2 * BURST
        answers = []
        for load in _fit_loads(rates):
            answers.append(_times(_ask(urls, load)))
            asked += len(load)
        judged = {str(share): _times(_ask(urls, _judge_load(rates, share, requests))) for share in SHARES}
        calm = watch.share(began, time.perf_counter())
        done = Round(answers, judged, asked // count, time.perf_counter() - began, calm)
        stack.close()
        for log in logs:
            shutil.move(log, folder)
    (folder / f"{count}-{place}.json").write_bytes(msgspec.json.encode(done))


def _run_prefixes(folder: Path) -> None:
    """A load whose prompts begin alike, on a server with a prefix cache."""
    with tempfile.TemporaryDirectory() as made:
        log = Path(made) / "prefix"
        with _served(log, 2, "--enable-prefix-caching") as url:
            _ask([url], mixed(60, *JUDGE, VOCABULARY, shared_prefix=200, rate=6.0, seed=8))
        shutil.move(log, folder)


def _fit_loads(rates: Rates) -> list[list[WorkloadRequest]]:
    return [
        mixed(count, *FIT, VOCABULARY, rate=share * rates.fit, seed=round(10 * share)) for share, count in FIT_LOADS
    ]


def _judge_load(rates: Rates, share: float, requests: int) -> list[WorkloadRequest]:
    return mixed(requests, *JUDGE, VOCABULARY, rate=share * rates.judge, seed=round(100 * share))


def _capacity(urls: Sequence[str], burst: Sequence[WorkloadRequest]) -> float:
    lines = _ask(urls, burst)
    return len(lines) / (max(line.stamps[-1][0] for line in lines) - min(line.sent for line in lines))


def _times(lines: Sequence[Timeline]) -> Times:
    return Times([line.ttft for line in lines], [line.tpot for line in lines])


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


# -- their simulation -------------------------------------------------------------------------------------------------


def _cases(folder: Path, count: int, runs: int, requests: int) -> list[dict[str, Any]]:
    """Compares the rounds so far. The cost of steps is fitted to the first loads of all of them."""
    places = [place for place in range(runs) if (folder / f"{count}-{place}.json").exists()]
    if not places:
        return []
    rounds = [msgspec.json.decode((folder / f"{count}-{place}.json").read_bytes(), type=Round) for place in places]
    rates = msgspec.json.decode((folder / f"{count}-rates.json").read_bytes(), type=Rates)
    steps: list[MeasuredStep] = []
    plans = 0
    for place, one in zip(places, rounds, strict=True):
        logs = [_events(folder / f"{count}-{place}-{i}.events") for i in range(count)]
        plans += sum(len(replay(events)) for events in logs)  # raises if a plan differs from the log's
        steps += measured_steps(*(_first(events, one.fitted_requests) for events in logs))
        begin = logs[0][0]
    assert isinstance(begin, Started)
    fitted = folder / f"{count}-cost.json"
    fitted.write_text(json.dumps(msgspec.to_builtins(FittedEngine(begin.config, begin.capacity, fit(steps), count))))
    fronts = [_front(rounds, load, fitted, count, place) for place, load in enumerate(_fit_loads(rates))]
    common: dict[str, Any] = {"replicas": count, "rounds": len(rounds), "plans made again": plans}
    common |= {"calm": [one.calm for one in rounds], "seconds": round(max(one.seconds for one in rounds))}
    cases = []
    for share in SHARES:
        # The API process and the client wait longer for a processor the busier the engines are.
        front = float(np.interp(share, [each for each, _ in FIT_LOADS], fronts))
        records = _simulated(_judge_load(rates, share, requests), fitted, count, front)
        simulated = _figures(Times([each.ttft for each in records], [each.tpot for each in records]))
        real = [_figures(one.judged[str(share)]) for one in rounds]
        compared = {name: _compared(name, [each[name] for each in real], simulated[name]) for name in simulated}
        rate = round(share * rates.judge, 3)
        cases.append({**common, "share": share, "rate": rate, "front_ms": round(1e3 * front, 2), **compared})
    return cases


def _front(rounds: Sequence[Round], load: Sequence[WorkloadRequest], fitted: Path, count: int, place: int) -> float:
    """Returns the seconds that the way to the engine and back takes at a load of the fitting workload."""
    real = mean(mean(one.fitted[place].ttft) for one in rounds if place < len(one.fitted))
    return max(real - mean(each.ttft for each in _simulated(load, fitted, count, 0.0)), 0.0)


def _compared(name: str, real: Sequence[float], simulated: float) -> dict[str, Any]:
    center = mean(real)
    spread = (max(real) - min(real)) / center
    error = simulated / center - 1
    return {
        "real_ms": [round(1e3 * value, 2) for value in real],
        "simulated_ms": round(1e3 * simulated, 2),
        "error": round(error, 3),
        "spread": round(spread, 3),
        "within": abs(error) <= max(spread, 0.15 if name.endswith("p99") else 0.10),
    }


def _prefix_hits(folder: Path) -> dict[str, int]:
    """Returns the prompt tokens that the prefix cache of the real server had, and those in its simulation, whose
    requests come from the server's event log."""
    log = folder / "prefix"
    if not log.exists():
        return {}
    plans = replay(_events(log))
    cost = folder / "prefix-cost.json"
    cost.write_text(json.dumps(msgspec.to_builtins(FittedEngine.measure([log]))))
    outcome = _simulation(log, cost, 1, 0.0).run()
    return {
        "plans made again": len(plans),
        "real": sum(new.num_computed for plan in plans for new in plan.new),
        "simulated": outcome.totals.prefix_hits,
        "looked up": outcome.totals.prefix_queries,
    }


def _events(log: Path) -> list[Event]:
    """Returns the events of a log, without a line that was cut off."""
    return list(read_events(line for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")))


def _first(events: Sequence[Event], requests: int) -> Sequence[Event]:
    """Returns the events before the request after the first `requests`."""
    added = [place for place, event in enumerate(events) if isinstance(event, Added)]
    return events[: added[requests]] if requests < len(added) else events


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
            "traffic": {"load": {"name": "load", "trace": {"file": str(trace.absolute())}}},
            "replicas": {"engine": {"cost": str(fitted.absolute()), "count": count}},
        },
        Scenario,
    )
    return build(scenario, load_prices(), fitted.parent)


def _figures(times: Times) -> dict[str, float]:
    return {
        "ttft_mean": mean(times.ttft),
        "tpot_mean": mean(times.tpot),
        "ttft_p99": percentile(times.ttft, 0.99),
        "tpot_p99": percentile(times.tpot, 0.99),
    }
