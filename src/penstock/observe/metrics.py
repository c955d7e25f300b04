"""Exposes a server's metrics to Prometheus.

Every series of a model has two names: `penstock_<name>`, and `vllm:<name>` for existing dashboards and routers. Some
have a third, which vLLM had earlier. Latencies have OpenTelemetry's GenAI name, too, by operation. Labels hold names
and codes, but no user text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric

from penstock.messages import EngineStats
from penstock.observe.costs import CostModel
from penstock.observe.counts import Counts
from penstock.observe.model_metrics import REASONS, EngineView, ModelMetrics
from penstock.observe.processes import usage
from penstock.observe.series import COUNTERS, GAUGES, GENAI, HISTOGRAMS, OLDER, counter_of, serves, sleeps

T = TypeVar("T")
_OURS, _VLLM = "penstock_", "vllm:"
_IDLE = EngineStats()
RELOADS = ("done", "unchanged", "refused", "failed")  # the results of reloads
STORAGE_ERRORS = ("full", "unavailable")  # the reasons for which something could not be stored or read
STORAGE_EVENTS = (*STORAGE_ERRORS, "responses_deleted")


class Room(Protocol):
    """A place with a limit. Sizes are in bytes."""

    def used(self) -> int: ...
    def free(self) -> int: ...


class CountedSeries(Protocol):
    """Series besides those of models and of the server, which its API processes count."""

    def collect(self) -> Iterator[Metric]: ...
    def counts(self) -> Counts:
        """Returns the counts, and as `now` what holds only while the process runs."""

    def load(self, counts: Counts) -> None:
        """Takes what `counts` returned, or the sum of several."""


class Metrics:
    """All series of one server process, exposed through a registry."""

    def __init__(
        self,
        registry: CollectorRegistry,
        dropped_lines: Callable[[], int] = lambda: 0,
        processes: Callable[[], tuple[int, float]] | None = None,
        *,
        vllm_names: bool = True,
    ) -> None:
        """`dropped_lines` returns the number of log lines dropped so far. `processes` returns the resident bytes and
        the processor seconds of the server's processes; None: it has only this one. With `vllm_names`, series of
        models have vLLM's names, too."""
        self.registry = registry
        self.in_flight: Callable[[], int] = lambda: 0  # the number of requests being answered
        self.certificate_end: Callable[[], float] | None = None  # of TLS, in seconds since the epoch; None: no TLS
        self.reloads = dict.fromkeys(RELOADS, 0)  # by result
        self.storage = dict.fromkeys(STORAGE_EVENTS, 0)
        self.storage_room: Room | None = None  # None: nothing is stored
        self._models: dict[str, ModelMetrics] = {}
        self._counted: CountedSeries | None = None
        self._requests: dict[tuple[str, str, str], int] = {}  # by method, route and code
        self._dropped_lines = dropped_lines
        registry.register(_Collector(_ModelSeries(self._models, vllm_names=vllm_names).collect))
        registry.register(_Collector(self._server))
        if processes is None:
            ProcessCollector(registry=registry)
        else:
            registry.register(_Collector(partial(_processes, processes)))

    def model(self, name: str, engine: EngineView, costs: CostModel | None = None) -> ModelMetrics:
        """Adds the series of one model. Every scrape and every delta reads `engine`. With `costs`, the share of the
        machine that it uses is estimated.

        Raises ValueError if the name has its series already.
        """
        if name in self._models:
            raise ValueError(f"model {name!r} has its metrics already; give each model a different name")
        found = self._models[name] = ModelMetrics(name, engine, costs)
        return found

    @property
    def models(self) -> Mapping[str, ModelMetrics]:
        """The metrics of the models, by name."""
        return self._models

    def add(self, series: CountedSeries) -> None:
        """Adds series, once."""
        self._counted = series
        self.registry.register(_Collector(series.collect))

    def forget(self, name: str) -> None:
        """Removes the series of a model that is no longer served."""
        del self._models[name]

    def http_request(self, method: str, route: str, code: int) -> None:
        """Counts an answered request. `route` is the route's template, so that there are few labels."""
        key = (method, route, str(code))
        self._requests[key] = self._requests.get(key, 0) + 1

    def counts(self) -> Counts:
        """Returns the server's counts, without those of models, for `load`."""
        counted = {"now": {}} if self._counted is None else self._counted.counts()
        return {
            "requests": {" ".join(key): count for key, count in self._requests.items()},
            "dropped_lines": self._dropped_lines(),
            "storage": dict(self.storage),
            "now": {"in_flight": self.in_flight(), **counted.pop("now")},
            "counted": counted,
        }

    def load(self, counts: Counts) -> None:
        """Takes what `counts` returned, or the sum of several."""
        for key, count in counts["requests"].items():
            method, route, code = key.split(" ")
            self._requests[method, route, code] = count
        self.in_flight = lambda: counts["now"].get("in_flight", 0)
        self.storage.update(counts["storage"])
        self._dropped_lines = lambda: counts["dropped_lines"]
        if self._counted is not None:
            self._counted.load({**counts["counted"], "now": counts["now"]})

    def _server(self) -> Iterator[Metric]:
        """The series that are not of a model."""
        text = "HTTP requests answered; code 499: the client disconnected first."
        yield counter_of("penstock_http_requests", text, ["method", "route", "code"], self._requests)
        text = "Requests being answered, those that wait included."
        yield GaugeMetricFamily("penstock_http_requests_in_flight", text, value=self.in_flight())
        text = "When the TLS certificate expires, in seconds since the epoch."
        expires = GaugeMetricFamily("penstock_tls_certificate_not_after_seconds", text, labels=[])
        if self.certificate_end is not None:
            expires.add_metric([], self.certificate_end())
        yield expires
        yield counter_of("penstock_reloads", "Reloads of the model, by result.", ["result"], self.reloads)
        yield from self._storage_series()
        text = "Log lines dropped because standard error was full."
        yield CounterMetricFamily("penstock_log_lines_dropped", text, value=self._dropped_lines())

    def _storage_series(self) -> Iterator[Metric]:
        """The series of stored responses, files and batches. Without storage there are no sizes."""
        room = self.storage_room
        text = "Size of the stored responses, files and batches."
        used = GaugeMetricFamily("penstock_storage_bytes", text, labels=[])
        text = "Bytes that may still be stored, by limit and disk."
        free = GaugeMetricFamily("penstock_storage_free_bytes", text, labels=[])
        if room is not None:
            used.add_metric([], room.used())
            free.add_metric([], room.free())
        yield used
        yield free
        text = "Times that something could not be stored or read, by reason."
        errors = {reason: self.storage[reason] for reason in STORAGE_ERRORS}
        yield counter_of("penstock_storage_errors", text, ["reason"], errors)
        text = "Stored responses deleted before they expired, to make room."
        yield CounterMetricFamily("penstock_storage_responses_deleted", text, value=self.storage["responses_deleted"])

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The exposition and its content type, which is OpenMetrics if the scraper accepts it."""
        return self.scrape(accept)()

    def scrape(self, accept: str | None = None) -> Callable[[], tuple[bytes, str]]:
        """Reads all values now. Returns a function that any thread may call to `render` them: that takes 4 ms."""
        encoder, content_type = choose_encoder(accept or "")
        found = _Collected(list(self.registry.collect()))
        return lambda: (encoder(cast(CollectorRegistry, found)), content_type)


class _Collected:
    """The metrics that a registry has collected, for an encoder."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


class _Collector:
    """A collector in prometheus_client's form."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect

    def describe(self) -> list[Metric]:
        """Returns no names. Without this method the registry would collect once at registration."""
        return []


def _processes(usage: Callable[[], tuple[int, float]]) -> Iterator[Metric]:
    """The series of prometheus_client's ProcessCollector that can be added up."""
    resident, seconds = usage()
    text = "Resident memory of the server's processes, without the engine."
    yield GaugeMetricFamily("process_resident_memory_bytes", text, value=resident)
    yield CounterMetricFamily("process_cpu_seconds", "Their user and system CPU time.", value=seconds)


class _ModelSeries:
    def __init__(self, models: dict[str, ModelMetrics], *, vllm_names: bool) -> None:
        self._models = models
        self._vllm_names = vllm_names

    def collect(self) -> Iterator[Metric]:
        stats = {model.name: model.engine.stats() for model in self._models.values()}
        # An engine that has ended runs nothing, but its last stats may say otherwise.
        load = {model.name: stats[model.name] if serves(model.engine) else _IDLE for model in self._models.values()}
        for model in self._models.values():
            model.observe_steps(stats[model.name])
        for prefix in (_OURS, _VLLM) if self._vllm_names else (_OURS,):
            yield from self._gauges(prefix, load)
            yield from self._counters(prefix, stats)
            yield from self._histograms(prefix)
        yield from self._machine(load)
        if self._vllm_names:
            yield from self._absent()
        yield from self._genai()

    def _gauges(self, prefix: str, load: dict[str, EngineStats]) -> Iterator[Metric]:
        for name, text, value in _named(prefix, GAUGES):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
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
        for name, text, value in _named(prefix, COUNTERS):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
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
        for name, text, histogram in _named(prefix, HISTOGRAMS):
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            for model in self._models.values():
                family.add_metric([model.name], histogram(model).buckets(), histogram(model).sum)
            yield family

    def _machine(self, load: dict[str, EngineStats]) -> Iterator[Metric]:
        """The version, what the engine's processes use, and what the machine can do. These have no other names."""
        labels = ["model_name"]
        memory = GaugeMetricFamily(
            "penstock_engine_resident_memory_bytes", "Resident memory of the engine and its ranks.", labels=labels
        )
        seconds = CounterMetricFamily(
            "penstock_engine_cpu_seconds", "Processor time of the engine and its ranks.", labels=labels
        )
        bandwidth = GaugeMetricFamily(
            "penstock_machine_read_bytes_per_second", "The most that the machine's memory can be read.", labels=labels
        )
        flops = GaugeMetricFamily(
            "penstock_machine_flops_per_second", "The most operations in products with weights.", labels=labels
        )
        version = GaugeMetricFamily(
            "penstock_model_info", "Always 1; the fingerprint is of the version.", labels=["model_name", "fingerprint"]
        )
        idle = not any(each.running + each.waiting for each in load.values())
        for name, model in self._models.items():
            version.add_metric([name, model.fingerprint], 1.0)
            if not sleeps(model.engine) and (used := usage(model.engine.info.pid)) is not None:
                memory.add_metric([name], used[0])
                seconds.add_metric([name], used[1])
            if (peak := model.machine(idle=idle)) is None:
                idle = False  # models are measured one after the other
                continue
            for family, rate in ((bandwidth, peak.read_bytes), (flops, peak.flops)):
                if rate:
                    family.add_metric([name], rate)
        yield from (version, memory, seconds, bandwidth, flops)

    def _absent(self) -> Iterator[Metric]:
        """Yields metrics that vLLM has or had, and this server does not: swapping, and adapters."""
        for name in (name for name, now in OLDER.items() if now is None):
            gauge = GaugeMetricFamily(f"vllm:{name}", "Always 0: nothing is swapped out.", labels=["model_name"])
            for model in self._models:
                gauge.add_metric([model], 0.0)
            yield gauge
        adapters = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of requests: there are none.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        adapters.add_metric(["0", "", ""], 1.0)
        yield adapters

    def _genai(self) -> Iterator[Metric]:
        labels = ["gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model"]
        for name, histogram in GENAI:
            title = f"gen_ai.server.{name}"
            family = HistogramMetricFamily(f"{title.replace('.', '_')}_seconds", title, labels=labels)
            for model in self._models.values():
                for operation, latencies in model.operations.items():
                    found = histogram(latencies)
                    family.add_metric([operation, "penstock", model.name], found.buckets(), found.sum)
            yield family


def _named(prefix: str, series: Sequence[tuple[str, str, T]]) -> Iterator[tuple[str, str, T]]:
    """The series with their whole names: a `vllm:` series also with the name that it had earlier."""
    for name, text, value in series:
        yield prefix + name, text, value
        if prefix == "vllm:":
            for older in (older for older, now in OLDER.items() if now == name):
                yield prefix + older, f"The same as {prefix}{name}.", value
