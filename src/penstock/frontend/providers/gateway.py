"""Puts the models of a providers file into a server."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from penstock.frontend.providers.fallbacks import Fallbacks
from penstock.frontend.providers.file import check_names, read_providers
from penstock.frontend.providers.model import served
from penstock.frontend.providers.provider import ProviderClient
from penstock.frontend.providers.routing import ModelRoute
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.versions.serving import Serving
from penstock.observe.counts import Counts
from penstock.observe.metrics import Metrics
from penstock.observe.series import counter_of


def open_gateway(
    path: str, models: ModelRegistry, metrics: Metrics, processes: int = 1, others: Collection[str] | None = ()
) -> Fallbacks:
    """Adds the models and routes of a providers file to those of a server, or of one of its API `processes`, which has
    its part of each provider's `concurrent`. `others` are names of more models that the file may use; None: the names
    in the file have been checked. Raises ValueError for a mistake in the file, a missing key or a name that is there
    twice."""
    file, named = read_providers(Path(path)), f"--providers {path}"
    providers = {}
    for name, entry in file.providers.items():
        part = -(-entry.concurrent // processes)
        providers[name] = ProviderClient(name, replace(entry, concurrent=part))
    for provider in providers.values():
        for model, of_model in provider.entry.models.items():
            models.add(Serving(served(model, of_model, provider), metrics))
    if others is not None:
        check_names(file, [*models.names(), *models.absent_names(), *others], named)
    models.routes = {name: entry.large for name, entry in file.routes.items()}
    routes = {name: ModelRoute(entry, f"{named}, at routes.{name}.classifier") for name, entry in file.routes.items()}
    fallbacks = Fallbacks(models, file.fallbacks, routes)
    metrics.add(_GatewaySeries(providers, fallbacks))
    return fallbacks


class _GatewaySeries:
    """The series of providers and fallbacks."""

    def __init__(self, providers: Mapping[str, ProviderClient], fallbacks: Fallbacks) -> None:
        self._providers, self._fallbacks = providers, fallbacks
        self._down: Mapping[str, int] = {}  # other processes whose circuit is open, by provider

    def counts(self) -> Counts:
        """See CountedSeries."""
        providers = self._providers.items()
        return {
            "results": {name: dict(provider.results) for name, provider in providers},
            "cost": {name: dict(provider.cost) for name, provider in providers},
            "fallbacks": _nested(self._fallbacks.counts),
            "routed": _nested(self._fallbacks.routed),
            "now": {
                "open": {name: provider.open_requests for name, provider in providers},
                "down": {name: int(not provider.up) for name, provider in providers},
            },
        }

    def load(self, counts: Counts) -> None:
        """See CountedSeries."""
        for name, provider in self._providers.items():
            provider.results = Counter(counts.get("results", {}).get(name, {}))
            provider.cost.update(counts.get("cost", {}).get(name, {}))
            provider.open_requests = counts["now"].get("open", {}).get(name, 0)
        self._down = counts["now"].get("down", {})
        self._fallbacks.counts = _flat(counts.get("fallbacks", {}))
        self._fallbacks.routed = _flat(counts.get("routed", {}))

    def collect(self) -> Iterator[Metric]:
        text = "Tries at the provider by result: ok, aborted, retried, continued, or the code of an error."
        results = CounterMetricFamily("penstock_provider_requests", text, labels=["provider", "result"])
        text = "What answers of the provider cost, in the currency of the providers file."
        cost = CounterMetricFamily("penstock_provider_cost", text, labels=["provider", "model_name"])
        text = "1 if the provider gets requests, 0 while it fails or has refused them."
        up = GaugeMetricFamily("penstock_provider_up", text, labels=["provider"])
        for provider in self._providers.values():
            for result, count in provider.results.items():
                results.add_metric([provider.name, result], count)
            for model, money in provider.cost.items():
                cost.add_metric([provider.name, model], money)
            up.add_metric([provider.name], float(provider.up and not self._down.get(provider.name)))
        yield from (results, cost, up)
        text = "Requests for which another model was tried."
        yield counter_of("penstock_fallbacks", text, ["model_name", "next"], self._fallbacks.counts)
        text = "Requests to a route, by the model that was chosen for them."
        yield counter_of("penstock_routed", text, ["route", "model_name"], self._fallbacks.routed)


def _nested(counter: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (one, other), count in counter.items():
        found.setdefault(one, {})[other] = count
    return found


def _flat(nested: Mapping[str, Mapping[str, int]]) -> Counter[tuple[str, str]]:
    return Counter({(one, other): count for one, counts in nested.items() for other, count in counts.items()})
