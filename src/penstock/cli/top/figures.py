"""Computes the figures of `penstock top` from two scrapes of /metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isinf

from penstock.cli.top.scrape import Scrape

PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Period:
    """The figures of a model between two scrapes. None: there is no data for the figure."""

    prompt_rate: float  # tokens a second
    output_rate: float
    request_rate: float
    first_token: tuple[float, ...] | None  # seconds at PERCENTILES
    per_token: tuple[float, ...] | None
    whole: tuple[float, ...] | None
    queued: float | None  # mean seconds
    prefix_hits: float | None  # share of prompt tokens
    accepted: float | None  # share of draft tokens
    prefill: float | None  # tokens of a step
    decode: float | None
    drafts: float | None
    step: float | None  # seconds of a step
    host: float | None
    bandwidth: float | None  # share of the machine's
    compute: float | None


class ScrapeDifference:
    """The difference between two scrapes of a model, `seconds` apart. Without `before`: since the server's start."""

    def __init__(self, model: str, now: Scrape, before: Scrape | None, seconds: float) -> None:
        self._model, self._now, self._before = model, now, before
        self._seconds = max(seconds, 1e-9)

    def count(self, name: str) -> float:
        """Returns the growth of a counter. If it fell, the server was restarted: then the count since the restart."""
        now = self._now.value(name, model_name=self._model) or 0.0
        before = 0.0 if self._before is None else self._before.value(name, model_name=self._model) or 0.0
        return now - before if now >= before else now

    def rate(self, name: str) -> float:
        return self.count(name) / self._seconds

    def per(self, name: str, other: str) -> float | None:
        """Returns the growth of a counter divided by that of another, or None if the other did not grow."""
        count = self.count(other)
        return self.count(name) / count if count else None

    def percentiles(self, name: str) -> tuple[float, ...] | None:
        now = self._now.buckets(name, self._model)
        before = {} if self._before is None else self._before.buckets(name, self._model)
        if any(before.get(bound, 0.0) > count for bound, count in now.items()):
            before = {}
        return quantiles({bound: count - before.get(bound, 0.0) for bound, count in now.items()})

    def share(self, work: str, peak: str) -> float | None:
        most = self._now.value(peak, model_name=self._model)
        return self.rate(work) / most if most else None

    def period(self) -> Period:
        steps = "penstock_engine_steps_total"
        parts = ("engine_step", "engine_forward", "engine_sample")
        whole, forward, sample = (self.per(f"penstock_{part}_seconds_total", steps) for part in parts)
        host = None if whole is None else max(whole - (forward or 0.0) - (sample or 0.0), 0.0)
        queue = "penstock_request_queue_time_seconds"
        return Period(
            prompt_rate=self.rate("penstock_prompt_tokens_total"),
            output_rate=self.rate("penstock_generation_tokens_total"),
            request_rate=self.rate("penstock_e2e_request_latency_seconds_count"),
            first_token=self.percentiles("penstock_time_to_first_token_seconds"),
            per_token=self.percentiles("penstock_inter_token_latency_seconds"),
            whole=self.percentiles("penstock_e2e_request_latency_seconds"),
            queued=self.per(f"{queue}_sum", f"{queue}_count"),
            prefix_hits=self.per("penstock_prefix_cache_hits_total", "penstock_prefix_cache_queries_total"),
            accepted=self.per(
                "penstock_spec_decode_num_accepted_tokens_total", "penstock_spec_decode_num_draft_tokens_total"
            ),
            prefill=self.per("penstock_engine_prefill_tokens_total", steps),
            decode=self.per("penstock_engine_decode_tokens_total", steps),
            drafts=self.per("penstock_spec_decode_num_draft_tokens_total", steps),
            step=whole,
            host=host,
            bandwidth=self.share("penstock_engine_read_bytes_total", "penstock_machine_read_bytes_per_second"),
            compute=self.share("penstock_engine_flops_total", "penstock_machine_flops_per_second"),
        )


def quantiles(buckets: Mapping[float, float]) -> tuple[float, ...] | None:
    """The values at PERCENTILES of cumulative counts by upper bound, as Prometheus computes them: the values of
    a bucket are taken to be spread evenly. Returns None if there are no values."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    found = []
    for share in PERCENTILES:
        wanted, low, below = share * total, 0.0, 0.0
        for bound in bounds:
            count = buckets[bound]
            if count >= wanted:
                within = (wanted - below) / (count - below) if count > below else 1.0
                found.append(low if isinf(bound) else low + (bound - low) * within)
                break
            low, below = bound if bound != inf else low, count
    return tuple(found)
