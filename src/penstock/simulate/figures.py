"""The figures of a run, and its series over time. Times are in milliseconds, shares in %."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.simulate.records import Outcome, RequestRecord
from penstock.simulate.scenario import Targets

PERCENTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def figures_of(outcome: Outcome, slo: Targets) -> dict[str, float | None]:
    """Returns the figures. None: there is nothing to compute one from. With several kinds of traffic, each has some of
    its own, such as `chat.ttft_ms_p99`."""
    requests, totals = outcome.requests, outcome.totals
    done = [each for each in requests if each.status == "done"]
    begin = min((each.at for each in requests), default=0)
    span = max((max((each.end for each in done), default=0) - begin) / 1e9, 1e-9)
    output = sum(each.output for each in done)
    prompt = sum(each.prompt for each in done)
    figures: dict[str, float | None] = {"requests": len(requests)}
    for status in ("done", "refused", "late", "failed", "open"):
        figures[status] = sum(each.status == status for each in requests)
    figures |= {
        "moves": sum(each.moves for each in requests),
        "seconds": totals.seconds,
        "throughput_rps": len(done) / span,
        "throughput_rps_max": max(Counter(each.end // 10**9 for each in done).values(), default=0),
        "output_tokens_per_s": output / span,
    }
    for name, values in _times(done).items():
        figures[f"{name}_mean"] = sum(values) / len(values) * 1e3 if values else None
        figures |= {f"{name}_{label}": _percentile(values, share) for label, share in PERCENTILES}
    filled = [each.kv_filled for each in outcome.samples if not math.isnan(each.kv_filled)]
    figures |= {
        "attained_pct": 100 * sum(_meets(each, slo) for each in requests) / len(requests) if requests else None,
        "batch_utilization_pct": _share(totals.rows_seconds, totals.slot_seconds),
        "gpu_utilization_pct": _share(totals.busy_seconds, totals.machine_seconds),
        "kv_held_pct_max": max((100 * each.kv_held for each in outcome.samples), default=None),
        "kv_filled_pct": 100 * sum(filled) / len(filled) if filled else None,
        "prefix_hit_pct": _share(totals.prefix_hits, totals.prefix_queries),
        "preemptions": totals.preemptions,
        "steps": totals.steps,
        "machine_hours": totals.machine_seconds / 3600,
        "device_hours": totals.device_hours,
        "cost": totals.cost,
        "cost_per_million_output_tokens": totals.cost / output * 1e6 if output else None,
        "cost_per_million_tokens": totals.cost / (output + prompt) * 1e6 if output else None,
    }
    kinds = list(dict.fromkeys(each.traffic for each in requests))
    for kind in kinds if len(kinds) > 1 else ():
        own = [each for each in done if each.traffic == kind]
        figures[f"{kind}.throughput_rps"] = len(own) / span
        for name, values in _times(own).items():
            figures |= {f"{kind}.{name}_{label}": _percentile(values, share) for label, share in PERCENTILES}
    return figures


def _times(done: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Returns the seconds of requests that were answered, sorted."""
    return {
        "inference_latency_ms": sorted(each.latency for each in done),
        "ttft_ms": sorted(each.ttft for each in done),
        "tpot_ms": sorted(each.tpot for each in done if each.output > 1),
    }


def _meets(record: RequestRecord, slo: Targets) -> bool:
    pairs = ((slo.ttft, record.ttft), (slo.tpot, record.tpot), (slo.latency, record.latency))
    return record.status == "done" and all(limit is None or value <= limit for limit, value in pairs)


def _share(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """Returns the nearest-rank percentile in milliseconds."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] * 1e3 if ordered else None


def series_of(outcome: Outcome) -> Mapping[str, list[Any]]:
    """Returns columns over time. Latencies are those of the requests that ended since the sample before."""
    columns: dict[str, list[Any]] = {"at": [sample.at for sample in outcome.samples]}
    ended = sorted((each for each in outcome.requests if each.status == "done"), key=lambda each: each.end)
    place, last = 0, 0.0
    names = ("throughput_rps", "inference_latency_ms_p50", "inference_latency_ms_p99", "ttft_ms_p50", "ttft_ms_p99")
    columns |= {name: [] for name in (*names, "tpot_ms_p50", "tpot_ms_p99")}
    for sample in outcome.samples:
        begin = place
        while place < len(ended) and ended[place].end <= sample.at * 1e9:
            place += 1
        columns["throughput_rps"].append((place - begin) / max(sample.at - last, 1e-9))
        for name, values in _times(ended[begin:place]).items():
            columns[f"{name}_p50"].append(_percentile(values, 0.5))
            columns[f"{name}_p99"].append(_percentile(values, 0.99))
        last = sample.at
    samples = outcome.samples
    return columns | {
        "batch_utilization_pct": [100 * each.batch for each in samples],
        "gpu_utilization_pct": [100 * each.busy for each in samples],
        "kv_held_pct": [100 * each.kv_held for each in samples],
        "kv_filled_pct": [None if math.isnan(each.kv_filled) else 100 * each.kv_filled for each in samples],
        "running": [each.running for each in samples],
        "waiting": [each.waiting for each in samples],
        "replicas": [each.replicas for each in samples],
        "cost": [each.cost for each in samples],
    }
