"""Exposes a server's metrics to Prometheus.

Every series of a model has two names: `penstock_<name>`, and `vllm:<name>` for existing dashboards and routers.
Latencies have a third, OpenTelemetry's GenAI name, by operation. Labels hold names and codes, but no user text.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from penstock.messages import EngineStats
from penstock.observe.histogram import Histogram
from penstock.observe.model_metrics import REASONS, EngineView, Latencies, ModelMetrics

_PREFIXES = ("penstock_", "vllm:")
_IDLE = EngineStats()


class Metrics:
    """All series of one server process, exposed through a registry."""

    def __init__(self, registry: CollectorRegistry, dropped_lines: Callable[[], int] = lambda: 0) -> None:
        """`dropped_lines` returns the number of log lines dropped so far."""
        self.registry = registry
        self._models: dict[str, ModelMetrics] = {}
        self._requests: dict[tuple[str, str, str], int] = {}  # by method, route and code
        registry.register(_Collector(self._models, self._requests, dropped_lines))

    def model(self, name: str, engine: EngineView) -> ModelMetrics:
        """Adds the series of one model. Every scrape and every delta reads `engine`.

        Raises ValueError if the name has its series already.
        """
        if name in self._models:
            raise ValueError(f"model {name!r} has its metrics already; give each model a different name")
        found = self._models[name] = ModelMetrics(name, engine)
        return found

    def http_request(self, method: str, route: str, code: int) -> None:
        """Counts an answered request. `route` is the route's template, so that there are few labels."""
        key = (method, route, str(code))
        self._requests[key] = self._requests.get(key, 0) + 1

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The exposition and its content type, which is OpenMetrics if the scraper accepts it."""
        encoder, content_type = choose_encoder(accept or "")
        return encoder(self.registry), content_type


def _serves(engine: EngineView) -> bool:
    return engine.healthy and not engine.restarting


_GAUGES: tuple[tuple[str, str, Callable[[EngineView, EngineStats], float]], ...] = (
    ("num_requests_running", "Requests in the running batch.", lambda _, stats: stats.running),
    ("num_requests_waiting", "Requests waiting to run.", lambda _, stats: stats.waiting),
    ("num_tokens_waiting", "Prompt tokens of requests waiting to run.", lambda engine, _: engine.queue.tokens),
    ("kv_cache_usage_perc", "Share of KV blocks held by requests, 1 = all.", lambda _, stats: stats.kv_usage),
    ("engine_healthy", "1 while the engine can serve.", lambda engine, _: float(_serves(engine))),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ModelMetrics, EngineStats], float]], ...] = (
    ("prompt_tokens", "Prompt tokens prefilled.", lambda model, _: model.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda model, _: model.generation_tokens),
    ("num_preemptions", "Requests preempted because KV blocks ran out.", lambda _, stats: stats.preemptions),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda _, stats: stats.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda _, stats: stats.prefix_hits),
    ("spec_decode_num_drafts", "Steps of sequences with drafts.", lambda _, stats: stats.drafts),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", lambda _, stats: stats.draft_tokens),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", lambda _, stats: stats.accepted_tokens),
    ("engine_restarts", "Engines started after one had ended.", lambda model, _: model.engine.restarts),
    ("requests_refused", "Requests refused because the queue was full.", lambda model, _: model.engine.queue.refused),
    ("requests_late", "Requests dropped or ended because of their deadline.", lambda model, _: model.engine.queue.late),
    ("engine_steps", "Engine steps.", lambda _, stats: stats.steps),
    ("engine_computed_tokens", "Tokens computed, recomputation included.", lambda _, stats: stats.computed_tokens),
    ("engine_step_seconds", "Time spent in steps.", lambda _, stats: stats.step_seconds),
    ("engine_forward_seconds", "Time spent in the model's forward.", lambda _, stats: stats.forward_seconds),
    ("engine_sample_seconds", "Time spent sampling.", lambda _, stats: stats.sample_seconds),
)
_HISTOGRAMS: tuple[tuple[str, str, Callable[[ModelMetrics], Histogram]], ...] = (
    ("time_to_first_token_seconds", "Time from a request to its first token.", lambda model: model.time_to_first_token),
    ("inter_token_latency_seconds", "Time between tokens of a choice.", lambda model: model.inter_token_latency),
    (
        "request_time_per_output_token_seconds",
        "Mean time per output token of a choice, after the first.",
        lambda model: model.time_per_output_token,
    ),
    ("e2e_request_latency_seconds", "Time from a request to its end.", lambda model: model.e2e_latency),
    ("request_queue_time_seconds", "Time a choice waits for its first step.", lambda model: model.queue_time),
    ("request_prefill_time_seconds", "Time from the first step to the first token.", lambda model: model.prefill_time),
    ("request_decode_time_seconds", "Time from the first token to the last.", lambda model: model.decode_time),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda model: model.prompt_sizes),
    ("request_generation_tokens", "Tokens of a choice.", lambda model: model.generation_sizes),
    ("iteration_tokens_total", "Tokens computed in a step.", lambda model: model.step_sizes),
)
_GENAI: tuple[tuple[str, Callable[[Latencies], Histogram]], ...] = (
    ("request.duration", lambda latencies: latencies.request),
    ("time_to_first_token", lambda latencies: latencies.first_token),
    ("time_per_output_token", lambda latencies: latencies.per_output_token),
)


class _Collector:
    """Implements prometheus_client's collector protocol."""

    def __init__(
        self,
        models: dict[str, ModelMetrics],
        requests: dict[tuple[str, str, str], int],
        dropped_lines: Callable[[], int],
    ) -> None:
        self._models = models
        self._requests = requests
        self._dropped_lines = dropped_lines

    def describe(self) -> list[Metric]:
        """Returns no names. Without this method the registry would collect once at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        stats = {model.name: model.engine.stats() for model in self._models.values()}
        # An engine that has ended runs nothing, but its last stats may say otherwise.
        load = {model.name: stats[model.name] if _serves(model.engine) else _IDLE for model in self._models.values()}
        for prefix in _PREFIXES:
            yield from self._gauges(prefix, load)
            yield from self._counters(prefix, stats)
            yield from self._histograms(prefix)
        yield from self._genai()
        text = "HTTP requests answered; code 499: the client disconnected first."
        answered = CounterMetricFamily("penstock_http_requests", text, labels=["method", "route", "code"])
        for key, count in self._requests.items():
            answered.add_metric(key, count)
        yield answered
        text = "Log lines dropped because standard error was full."
        yield CounterMetricFamily("penstock_log_lines_dropped", text, value=self._dropped_lines())

    def _gauges(self, prefix: str, load: dict[str, EngineStats]) -> Iterator[Metric]:
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(prefix + name, text, labels=["model_name"])
            for model in self._models.values():
                gauge.add_metric([model.name], value(model.engine, load[model.name]))
            yield gauge
        # num_gpu_blocks is vLLM's name for the pool's size, on any device.
        labels = ["model_name", "block_size", "num_gpu_blocks", "cache_dtype"]
        config = GaugeMetricFamily(prefix + "cache_config_info", "Layout of the KV cache.", labels=labels)
        for model in self._models.values():
            info = model.engine.info
            config.add_metric([model.name, str(info.block_size), str(sum(info.num_blocks)), info.dtype], 1.0)
        yield config

    def _counters(self, prefix: str, stats: dict[str, EngineStats]) -> Iterator[Metric]:
        for name, text, value in _COUNTERS:
            counter = CounterMetricFamily(prefix + name, text, labels=["model_name"])
            for model in self._models.values():
                counter.add_metric([model.name], value(model, stats[model.name]))
            yield counter
        ended = CounterMetricFamily(
            prefix + "request_success", "Choices ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for model in self._models.values():
            for reason in REASONS:
                ended.add_metric([model.name, reason], model.finished[reason])
        yield ended
        accepted = CounterMetricFamily(
            prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place among those of a step.",
            labels=["model_name", "position"],
        )
        for model in self._models.values():
            for position, count in enumerate(stats[model.name].accepted_at):
                accepted.add_metric([model.name, str(position)], count)
        yield accepted

    def _histograms(self, prefix: str) -> Iterator[Metric]:
        for name, text, histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(prefix + name, text, labels=["model_name"])
            for model in self._models.values():
                family.add_metric([model.name], histogram(model).buckets(), histogram(model).sum)
            yield family

    def _genai(self) -> Iterator[Metric]:
        labels = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
        for name, histogram in _GENAI:
            title = f"gen_ai.server.{name}"
            family = HistogramMetricFamily(f"{title.replace('.', '_')}_seconds", title, labels=labels)
            for model in self._models.values():
                for operation, latencies in model.operations.items():
                    found = histogram(latencies)
                    family.add_metric([operation, "penstock", model.name], found.buckets(), found.sum)
            yield family
