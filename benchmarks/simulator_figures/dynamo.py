"""Dynamo's replay of a trace, in a Python that can import it, beside our simulation of it with Dynamo's step times."""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from msgspec.structs import replace

from penstock.simulate.build import build
from penstock.simulate.prices import load_prices
from penstock.simulate.records import RequestRecord
from simulator_figures.traces import DynamoCost, mooncake

# Its defaults, with the sizes of our scenario `mooncake`.
REPLAY = """
import json, sys
from importlib.metadata import version
from dynamo.replay import run_trace_replay
trace, speed, router, out = sys.argv[1:]
engine = {"num_gpu_blocks": 16384, "block_size": 64, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
report = run_trace_replay(trace, extra_engine_args={"engine": engine}, num_workers=8, router_mode=router,
                          arrival_speedup_ratio=float(speed), trace_block_size=512, capture_per_request=True)
rows = [[one["arrival_time_ms"], one["input_length"], one["reused_input_tokens"], one["output_length"], one["ttft_ms"],
         one["last_token_ms"] - one["first_token_ms"], one["decode_worker_idx"]] for one in report.per_request]
json.dump({"version": version("ai-dynamo"), "rows": rows}, open(out, "w"))
"""
ROUTERS = {"round_robin": "round_robin", "kv_router": "cluster"}  # Dynamo's name, ours
LONGEST = 131072  # tokens of a request: ours refuses longer ones, which Dynamo computes
GOOD_TTFT, GOOD_TPOT = 2000.0, 25.0  # ms


class Replayed(NamedTuple):
    """One request of either simulator. Times in ms."""

    at: float
    prompt: int
    reused: int
    output: int
    ttft: float
    decode: float  # from the first token to the last
    worker: int

    @property
    def tpot(self) -> float:
        return self.decode / max(self.output - 1, 1)


def dynamo_figures(python: Path, trace: Path, speeds: Sequence[float]) -> dict[str, Any]:
    """Returns the figures of both simulators for each speed and router, and how far single requests are apart."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / trace.name
        short.write_text("".join(_short_requests(trace)))
        for speed in speeds:
            for theirs, ours in ROUTERS.items():
                version, replayed = _replay(python, short, speed, theirs)
                simulated = _simulate(short, speed, ours)
                case: dict[str, Any] = {"dynamo": _figures(replayed), "penstock": _figures(simulated)}
                if ours == "round_robin":  # both send each request to the same place
                    case["apart"] = _apart(replayed, simulated)
                found |= {"version": version, f"x{speed:g} {ours}": case}
                print(f"x{speed:g} {ours}: {case}", flush=True)
    return found


def _short_requests(trace: Path) -> Iterator[str]:
    for line in trace.read_text().splitlines(keepends=True):
        row = json.loads(line)
        if row["input_length"] + row["output_length"] <= LONGEST:
            yield line


def _replay(python: Path, trace: Path, speed: float, router: str) -> tuple[str, list[Replayed]]:
    out = trace.with_suffix(".report.json")
    command = [str(python), "-c", REPLAY, str(trace), f"{speed:g}", router, str(out)]
    subprocess.run(command, check=True, timeout=600, stderr=subprocess.DEVNULL)
    report = json.loads(out.read_text())
    return report["version"], [Replayed(*row) for row in report["rows"]]


def _simulate(trace: Path, speed: float, router: str) -> list[Replayed]:
    simulation = build(mooncake(trace, router, speed), load_prices(), Path())
    for replica in simulation.replicas.values():
        replica.cost = DynamoCost(replica.kv_tokens)
        # Two rules of Dynamo's engine. It plans a step when the one before has ended; ours plans one ahead on a GPU.
        replica.capacity = replace(replica.capacity, depth=1)
    # And a step begins when all requests of a moment have come. The traces have one time for all of 3 s.
    wake = simulation._wake
    simulation._wake = lambda replica: simulation.at(simulation.clock.ns + 1, wake, replica)  # type: ignore[method-assign]
    return [_replayed(each) for each in simulation.run().requests]


def _replayed(record: RequestRecord) -> Replayed:
    worker = int(record.replica.rpartition("-")[2])
    decode = (record.end - record.first) / 1e6
    return Replayed(record.at / 1e6, record.prompt, record.cached, record.output, record.ttft * 1e3, decode, worker)


def _figures(requests: Sequence[Replayed]) -> dict[str, float]:
    ttfts, tpots = sorted(each.ttft for each in requests), sorted(each.tpot for each in requests if each.output > 1)
    good = sum(each.ttft <= GOOD_TTFT and each.tpot <= GOOD_TPOT for each in requests)
    figures = {
        "requests": len(requests),
        "reused_pct": 100 * sum(each.reused for each in requests) / sum(each.prompt for each in requests),
        "ttft_ms_mean": fmean(ttfts),
        "ttft_ms_p99": ttfts[len(ttfts) * 99 // 100],
        "tpot_ms_mean": fmean(tpots),
        "tpot_ms_p50": median(tpots),
        "tpot_ms_p99": tpots[len(tpots) * 99 // 100],
        "goodput_pct": 100 * good / len(requests),
    }
    return {name: round(value, 2) for name, value in figures.items()}


def _apart(theirs: Sequence[Replayed], ours: Sequence[Replayed]) -> dict[str, float]:
    """Returns how single requests differ: where they went, what they reused, and their times."""
    orders = (sorted(each, key=lambda one: (round(one.at, 2), one.prompt, one.output)) for each in (theirs, ours))
    pairs = list(zip(*orders, strict=True))
    assert all((a.prompt, a.output) == (b.prompt, b.output) for a, b in pairs)
    errors = [abs(b.ttft / a.ttft - 1) for a, b in pairs]
    return {
        "same_worker_pct": round(100 * sum(a.worker == b.worker for a, b in pairs) / len(pairs), 2),
        "same_reuse_pct": round(100 * sum(abs(a.reused - b.reused) < 64 for a, b in pairs) / len(pairs), 2),
        "ttft_median_error_pct": round(100 * median(errors), 2),
        "ttft_ms_mean_same_reuse": [
            round(fmean(values), 2)
            for values in zip(*((a.ttft, b.ttft) for a, b in pairs if abs(a.reused - b.reused) < 64), strict=True)
        ],
    }
