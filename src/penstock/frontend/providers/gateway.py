"""Puts the models of a providers file into a server."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from penstock.frontend.providers.fallbacks import Fallbacks
from penstock.frontend.providers.file import check_names, read_providers
from penstock.frontend.providers.model import served
from penstock.frontend.providers.provider import ProviderClient
from penstock.frontend.providers.routing import ModelRoute
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.versions.serving import Serving
from penstock.observe.metrics import Metrics


def open_gateway(path: str, models: ModelRegistry, metrics: Metrics) -> Fallbacks:
    """Adds the models and routes of a providers file to those of a server. Raises ValueError for a mistake in the file,
    a missing key or a name that is there twice."""
    file, named = read_providers(Path(path)), f"--providers {path}"
    providers = [ProviderClient(name, entry) for name, entry in file.providers.items()]
    for provider in providers:
        for model, entry in provider.entry.models.items():
            models.add(Serving(served(model, entry, provider), metrics))
    check_names(file, [*models.names(), *models.absent_names()], named)
    models.routes = {name: entry.large for name, entry in file.routes.items()}
    routes = {name: ModelRoute(entry, f"{named}, at routes.{name}.classifier") for name, entry in file.routes.items()}
    fallbacks = Fallbacks(models, file.fallbacks, routes)
    metrics.registry.register(_GatewaySeries(providers, fallbacks))
    return fallbacks


class _GatewaySeries:
    """The series of providers and fallbacks."""

    def __init__(self, providers: Iterable[ProviderClient], fallbacks: Fallbacks) -> None:
        self._providers, self._fallbacks = tuple(providers), fallbacks

    def describe(self) -> Iterable[Metric]:
        return ()  # names are checked at the scrape

    def collect(self) -> Iterator[Metric]:
        text = "Tries at the provider by result: ok, aborted, retried, continued, or the code of an error."
        results = CounterMetricFamily("penstock_provider_requests", text, labels=["provider", "result"])
        text = "What answers of the provider cost, in the currency of the providers file."
        cost = CounterMetricFamily("penstock_provider_cost", text, labels=["provider", "model_name"])
        text = "1 if the provider gets requests, 0 while it fails or has refused them."
        up = GaugeMetricFamily("penstock_provider_up", text, labels=["provider"])
        for provider in self._providers:
            for result, count in provider.results.items():
                results.add_metric([provider.name, result], count)
            for model, money in provider.cost.items():
                cost.add_metric([provider.name, model], money)
            up.add_metric([provider.name], float(provider.up))
        yield from (results, cost, up)
        text = "Requests for which another model was tried."
        fallbacks = CounterMetricFamily("penstock_fallbacks", text, labels=["model_name", "next"])
        for pair, count in self._fallbacks.counts.items():
            fallbacks.add_metric(pair, count)
        yield fallbacks
        text = "Requests to a route, by the model that was chosen for them."
        routed = CounterMetricFamily("penstock_routed", text, labels=["route", "model_name"])
        for pair, count in self._fallbacks.routed.items():
            routed.add_metric(pair, count)
        yield routed
