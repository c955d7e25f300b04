"""Counts what one model's requests do, as their deltas arrive."""

from typing import Protocol

from penstock.messages import EngineInfo, EngineState, EngineStats, FinishReason, Queue, RequestTiming
from penstock.observe.costs import CostModel, MachinePeak, WorkTotals
from penstock.observe.counts import Counts
from penstock.observe.histogram import REQUEST_SECONDS, TOKEN_COUNTS, TOKEN_SECONDS, Histogram

REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


# The histograms that requests write; `step_sizes` is of the engine.
_OF_REQUESTS = (
    *("time_to_first_token", "inter_token_latency", "time_per_output_token", "e2e_latency", "queue_time"),
    *("prefill_time", "decode_time", "inference_time", "prompt_sizes", "generation_sizes"),
)
_OF_OPERATIONS = ("request", "first_token", "per_output_token")


class EngineView(Protocol):
    """The part of an engine client that metrics read. No method may block."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def state(self) -> EngineState: ...
    @property
    def queue(self) -> Queue: ...
    def stats(self) -> EngineStats: ...


class Latencies:
    """Latencies of one operation's requests, for OpenTelemetry's names."""

    __slots__ = ("first_token", "per_output_token", "request")

    def __init__(self) -> None:
        self.request = Histogram(REQUEST_SECONDS)
        self.first_token = Histogram(REQUEST_SECONDS)
        self.per_output_token = Histogram(TOKEN_SECONDS)


class ModelMetrics:
    """The metrics of one model. One event loop writes and scrapes them."""

    def __init__(self, name: str, engine: EngineView, costs: CostModel | None = None) -> None:
        """Without `costs`, the work of steps is not estimated."""
        self.name = name
        self.engine = engine
        self.fingerprint = ""  # of the version that is served
        self._seen = engine.stats()
        self._peak = None if costs is None else costs.peak
        self.work = None if costs is None else WorkTotals(costs.costs)
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: dict[FinishReason, int] = dict.fromkeys(REASONS, 0)
        self.time_to_first_token = Histogram(REQUEST_SECONDS)
        self.inter_token_latency = Histogram(TOKEN_SECONDS)
        self.time_per_output_token = Histogram(TOKEN_SECONDS)
        self.e2e_latency = Histogram(REQUEST_SECONDS)
        self.queue_time = Histogram(REQUEST_SECONDS)
        self.prefill_time = Histogram(REQUEST_SECONDS)
        self.decode_time = Histogram(REQUEST_SECONDS)
        self.inference_time = Histogram(REQUEST_SECONDS)
        self.prompt_sizes = Histogram(TOKEN_COUNTS)
        self.generation_sizes = Histogram(TOKEN_COUNTS)
        self.step_sizes = Histogram(TOKEN_COUNTS)
        self.operations: dict[str, Latencies] = {}

    def counts(self) -> Counts:
        return {
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "finished": dict(self.finished),
            "histograms": {name: getattr(self, name).counts() for name in _OF_REQUESTS},
            "operations": {
                operation: {name: getattr(found, name).counts() for name in _OF_OPERATIONS}
                for operation, found in self.operations.items()
            },
        }

    def load(self, counts: Counts) -> None:
        """Takes what `counts` returned, or the sum of several."""
        self.prompt_tokens, self.generation_tokens = counts["prompt_tokens"], counts["generation_tokens"]
        self.finished.update(counts["finished"])
        for name in _OF_REQUESTS:
            getattr(self, name).load(counts["histograms"][name])
        for operation, histograms in counts["operations"].items():
            for name in _OF_OPERATIONS:
                getattr(self._latencies(operation), name).load(histograms[name])

    def exchange(self, costs: CostModel | None) -> None:
        """Takes the costs of another engine's steps. The totals go on."""
        before = self.work
        self.work = None if costs is None else WorkTotals(costs.costs)
        if before is not None and self.work is not None:
            self.work.read_bytes, self.work.flops = before.read_bytes, before.flops

    def request_prefilled(self, operation: str, prompt_tokens: int, seconds: float) -> None:
        """Counts a request whose first token arrived `seconds` after the request."""
        self.prompt_tokens += prompt_tokens
        self.prompt_sizes.observe(prompt_tokens)
        self.time_to_first_token.observe(seconds)
        self._latencies(operation).first_token.observe(seconds)

    def tokens_arrived(self, count: int, seconds: float) -> None:
        """Counts tokens that arrived together, `seconds` after the choice's previous ones (0: they are its first)."""
        self.generation_tokens += count
        if seconds and count:
            self.inter_token_latency.observe(seconds / count, count)
        stats = self.engine.stats()
        if stats.steps != self._seen.steps:
            self.observe_steps(stats)

    def choice_finished(self, operation: str, reason: FinishReason, tokens: int, decode_seconds: float) -> None:
        """Counts a choice of `tokens` tokens that ended `decode_seconds` after its first token."""
        self.finished[reason] += 1
        self.generation_sizes.observe(tokens)
        if tokens > 1:
            seconds = decode_seconds / (tokens - 1)
            self.time_per_output_token.observe(seconds)
            self._latencies(operation).per_output_token.observe(seconds)

    def choices_cut_short(self, reason: FinishReason, count: int) -> None:
        """Counts choices that ended before they were complete. They are not in the latencies."""
        self.finished[reason] += count

    def engine_timed(self, timing: RequestTiming) -> None:
        """Counts the times of a choice as the engine measured them."""
        self.queue_time.observe(timing.queued)
        self.prefill_time.observe(timing.prefill)
        self.decode_time.observe(timing.decode)
        self.inference_time.observe(timing.prefill + timing.decode)

    def request_finished(self, operation: str, seconds: float) -> None:
        """Counts a request whose last choice ended `seconds` after the request."""
        self.e2e_latency.observe(seconds)
        self._latencies(operation).request.observe(seconds)

    def _latencies(self, operation: str) -> Latencies:
        found = self.operations.get(operation)
        if found is None:
            found = self.operations[operation] = Latencies()
        return found

    def machine(self, *, idle: bool) -> MachinePeak | None:
        """Returns the machine's peak, as far as it was measured or is in the tables; None until it was measured."""
        return MachinePeak() if self._peak is None else self._peak.look(idle=idle)

    def observe_steps(self, stats: EngineStats) -> None:
        """Counts the steps since the last call: their mean number of tokens, and their work."""
        seen, self._seen = self._seen, stats
        steps = stats.steps - seen.steps
        if steps > 0:
            self.step_sizes.observe((stats.computed_tokens - seen.computed_tokens) / steps, steps)
            if self.work is not None:
                self.work.add(seen, stats)
