"""The series of one-shot models: Triton's names, and ours by version."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from penstock.messages.tensors import TensorModel
from penstock.repository.oneshot import OneShotModel
from penstock.repository.rollouts.service import RepositoryRollouts
from penstock.repository.statistics import ModelStatistics

_LABELS = ["model", "version"]
_WINDOW_SECONDS = 5.0  # over which a rate is measured
_DURATIONS = (
    ("request", "success", "requests, from arrival to answer"),
    ("queue", "queue", "requests in the queue"),
    ("compute_input", "compute_input", "reading inputs"),
    ("compute_infer", "compute_infer", "running models"),
    ("compute_output", "compute_output", "writing outputs"),
)


class RepositoryMetrics:
    """A collector in prometheus_client's form."""

    def __init__(self, models: Callable[[], list[TensorModel]], rollouts: RepositoryRollouts) -> None:
        """`models` returns those that are ready."""
        self._models, self._rollouts = models, rollouts
        self._rates: dict[tuple[str, str], tuple[float, int, float]] = {}  # (time, requests, rate) of the last window

    def describe(self) -> list[Metric]:
        """Returns no names. Without this method the registry would collect once at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Returns the series of the models that are ready now."""
        found = [model for model in self._models() if isinstance(model, OneShotModel)]
        counts = [({"model": model.name, "version": model.version}, model.statistics_of) for model in found]
        answered = ((labels, each.answered) for labels, each in counts)
        yield _tritons("request_success", "Requests answered.", answered)
        yield _tritons("count", "Rows inferred.", ((labels, each.inferences) for labels, each in counts))
        yield _tritons("exec_count", "Batches run.", ((labels, each.executions) for labels, each in counts))
        durations = [(labels, each.durations) for labels, each in counts]
        for name, key, text in _DURATIONS:
            times = ((labels, each[key].ns // 1000) for labels, each in durations)
            yield _tritons(f"{name}_duration_us", f"Time of {text}, in µs.", times)
        failed = (
            ({**labels, "reason": reason}, count)
            for labels, statistics in counts
            for reason, count in statistics.failures.items()
        )
        yield _tritons("request_failure", "Requests that ended with an error.", failed)
        waiting = [
            (labels, model.runner.batcher.waiting)
            for (labels, _), model in zip(counts, found, strict=True)
            if model.runner.batcher is not None
        ]
        yield _tritons("pending_request_count", "Requests that wait.", waiting)
        yield from self._ours(found)
        yield from self._of_rollouts()

    def _of_rollouts(self) -> Iterator[Metric]:
        share = GaugeMetricFamily(
            "penstock_rollout_share_pct", "Requests that a candidate answers.", labels=[*_LABELS, "status"]
        )
        worse = GaugeMetricFamily(
            "penstock_rollout_worse",
            "By how much a candidate is worse: the mean, and the bounds of its confidence sequence.",
            labels=[*_LABELS, "judge", "bound"],
        )
        for each in self._rollouts.rows():
            labels = [each["name"], each["candidate"]]
            share.add_metric([*labels, each["status"]], each["share"])
            for judge in each["judges"]:
                for bound in ("low", "mean", "high"):
                    worse.add_metric([*labels, judge["name"], bound], judge[bound])
        yield from (share, worse)

    def _ours(self, found: list[OneShotModel]) -> Iterator[Metric]:
        reasons = CounterMetricFamily("penstock_batches", "Batches, by why they ran.", labels=[*_LABELS, "reason"])
        full = GaugeMetricFamily("batch_utilization_pct", "Rows of a batch, of the most.", labels=_LABELS)
        rate = GaugeMetricFamily("throughput_rps", "Requests answered a second, over the last seconds.", labels=_LABELS)
        latency = HistogramMetricFamily("inference_latency_ms", "Time from arrival to answer.", labels=_LABELS)
        for model in found:
            labels, statistics = [model.name, model.version], model.statistics_of
            if (batcher := model.runner.batcher) is not None:
                for reason, count in batcher.reasons.items():
                    reasons.add_metric([*labels, reason], count)
                if statistics.executions:
                    rows = statistics.inferences / statistics.executions
                    full.add_metric(labels, 100 * rows / batcher.rules.max_rows)
            rate.add_metric(labels, self._rate((model.name, model.version), statistics))
            buckets = [
                (bound if bound == "+Inf" else repr(float(bound) * 1000), count)
                for bound, count in statistics.latency.buckets()
            ]
            latency.add_metric(labels, buckets, statistics.latency.sum * 1000)
        yield from (reasons, full, rate, latency)

    def _rate(self, key: tuple[str, str], statistics: ModelStatistics) -> float:
        now, count = time.monotonic(), statistics.answered
        began, before, rate = self._rates.get(key, (statistics.began, 0, 0.0))
        if now - began >= _WINDOW_SECONDS or key not in self._rates:
            rate = (count - before) / max(now - began, 0.001)
            self._rates[key] = (now, count, rate)
        return rate


def _tritons(name: str, text: str, values: Iterable[tuple[dict[str, str], float]]) -> Metric:
    """A series with exactly the name that Triton's has: that of a counter would end with _total."""
    metric = Metric(f"nv_inference_{name}", text, "unknown")
    for labels, value in values:
        metric.add_sample(metric.name, labels, value)
    return metric
