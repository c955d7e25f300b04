"""The series of one-shot models: Triton's names, and ours by version."""

import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from penstock.messages.tensors import TensorModel
from penstock.repository.ensemble import Ensemble
from penstock.repository.oneshot import OneShotModel
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

    def __init__(self, models: Callable[[], list[TensorModel]]) -> None:
        """`models` returns those that are ready."""
        self._models = models
        self._rates: dict[tuple[str, str], tuple[float, int, float]] = {}  # (time, requests, rate) of the last window

    def describe(self) -> list[Metric]:
        """Returns no names. Without this method the registry would collect once at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Returns the series of the models that are ready now."""
        found = [model for model in self._models() if isinstance(model, OneShotModel | Ensemble)]
        counts = [([model.name, model.version], model.statistics_of) for model in found]
        for name, text, value in (
            ("request_success", "Requests answered.", lambda s: s.durations["success"].count),
            ("request_failure", "Requests that ended with an error.", lambda s: s.durations["fail"].count),
            ("count", "Rows inferred.", lambda s: s.inferences),
            ("exec_count", "Batches run.", lambda s: s.executions),
        ):
            yield _family(CounterMetricFamily(f"nv_inference_{name}", text, labels=_LABELS), counts, value)
        for name, key, text in _DURATIONS:
            family = CounterMetricFamily(f"nv_inference_{name}_duration_us", f"Time of {text}, in µs.", labels=_LABELS)
            yield _family(family, counts, lambda s, key=key: s.durations[key].ns // 1000)  # type: ignore[misc]
        pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests that wait.", labels=_LABELS)
        reasons = CounterMetricFamily("penstock_batches", "Batches, by why they ran.", labels=[*_LABELS, "reason"])
        full = GaugeMetricFamily("batch_utilization_pct", "Rows of a batch, of the most.", labels=_LABELS)
        for model in found:
            if isinstance(model, OneShotModel):
                labels, batcher = [model.name, model.version], model.batches.batcher
                pending.add_metric(labels, batcher.waiting)
                for reason, count in batcher.reasons.items():
                    reasons.add_metric([*labels, reason], count)
                if model.statistics_of.executions:
                    rows = model.statistics_of.inferences / model.statistics_of.executions
                    full.add_metric(labels, 100 * rows / batcher.rules.max_rows)
        yield from (pending, reasons, full)
        rate = GaugeMetricFamily("throughput_rps", "Requests answered a second, over the last seconds.", labels=_LABELS)
        latency = HistogramMetricFamily("inference_latency_ms", "Time from arrival to answer.", labels=_LABELS)
        for labels, counts_of in counts:
            rate.add_metric(labels, self._rate((labels[0], labels[1]), counts_of))
            buckets = [
                (bound if bound == "+Inf" else repr(float(bound) * 1000), count)
                for bound, count in counts_of.latency.buckets()
            ]
            latency.add_metric(labels, buckets, counts_of.latency.sum * 1000)
        yield from (rate, latency)

    def _rate(self, key: tuple[str, str], statistics: ModelStatistics) -> float:
        now, count = time.monotonic(), statistics.durations["success"].count
        began, before, rate = self._rates.get(key, (statistics.began, 0, 0.0))
        if now - began >= _WINDOW_SECONDS or key not in self._rates:
            rate = (count - before) / max(now - began, 0.001)
            self._rates[key] = (now, count, rate)
        return rate


def _family(
    family: CounterMetricFamily,
    counts: list[tuple[list[str], ModelStatistics]],
    value: Callable[[ModelStatistics], float],
) -> Metric:
    for labels, statistics in counts:
        family.add_metric(labels, value(statistics))
    return family
