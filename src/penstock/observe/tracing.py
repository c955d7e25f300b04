"""Sends a trace of each request to an OpenTelemetry collector (OTLP over HTTP).

The packages are the extra `otel`, and are imported only by `Tracer`. Spans are made when a request has ended, from
times that are there anyway. A thread sends them; its queue is bounded, and drops spans when it is full.
"""

import logging
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from penstock.messages import FinishReason, GenerateRequest, RequestTiming

MOST_CHOICES = 8  # of a request that have spans of their own
CLOSE_SECONDS = 3.0  # to send the last spans when the server ends
_TRACES = "/v1/traces"
_FAILED = 500  # status codes from here on are errors of the server


class WrongEndpoint(ValueError):
    """Traces cannot be sent to this endpoint. The message is one line that says what to change."""


def check_endpoint(endpoint: str) -> None:
    """Raises WrongEndpoint if the URL is wrong, or the packages of the extra are missing."""
    try:
        parts = urlsplit(endpoint)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port
        right = False
    if not right:
        raise WrongEndpoint(f"--otlp-endpoint {endpoint!r} is not a URL; write for example http://localhost:4318")
    try:
        missing = not (find_spec("opentelemetry.sdk.trace") and find_spec("opentelemetry.exporter.otlp.proto.http"))
    except ModuleNotFoundError:  # of a parent
        missing = True
    if missing:
        raise WrongEndpoint(
            f"--otlp-endpoint is {endpoint}, but OpenTelemetry is not installed: run pip install 'penstock[otel]', "
            "or leave it out"
        )


class RequestTrace:
    """Collects what is known about a request until it ends."""

    __slots__ = (
        *("_choices", "_parent", "_requests", "_start", "_tracer"),
        *("attributes", "error", "model", "operation", "reasons"),
    )

    def __init__(self, tracer: "Tracer", parent: Any, start: float, model: str) -> None:
        self._tracer = tracer
        self.model = model  # its name
        self._parent = parent
        self._start = start
        self._requests: list[GenerateRequest] = []
        self._choices: list[tuple[float, RequestTiming]] = []
        self.operation = ""
        self.error = ""  # the kind of error that ended it, also one after the answer had begun
        self.reasons: list[FinishReason] = []
        self.attributes: dict[str, Any] = {}

    def call(self, operation: str, model: str, requests: list[GenerateRequest]) -> None:
        """Takes the requests to a model's engine: `operation` is OpenTelemetry's name for the kind of call."""
        self.operation, self.model, self._requests = operation, model, requests

    def engine_timed(self, timing: RequestTiming, ended: float) -> None:
        """Takes the engine's times of a choice, whose last token arrived at `ended` on time.monotonic()."""
        if len(self._choices) < MOST_CHOICES:
            self._choices.append((ended, timing))

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        self.attributes["gen_ai.usage.input_tokens"] = prompt_tokens
        self.attributes["gen_ai.usage.output_tokens"] = completion_tokens
        self.attributes["gen_ai.usage.cache_read.input_tokens"] = cached_tokens

    def end(self, status: int) -> None:
        """Makes the spans of the request, which has been answered with this HTTP status."""
        self.attributes["http.response.status_code"] = status
        if self._requests:
            self.attributes.update(_asked(self._requests))
        if self.reasons:
            self.attributes["gen_ai.response.finish_reasons"] = self.reasons
        if self.error or status >= _FAILED:
            self.attributes["error.type"] = self.error or str(status)
        self._tracer.send(self, self._parent, self._start, self._choices)


class Tracer:
    """Makes the spans of requests. Used from one event loop."""

    def __init__(self, endpoint: str, version: str) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)  # it logs the text of a wrong tracestate
        self._api: Any = trace
        resource = Resource.create({"service.version": version})  # and OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "penstock"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
        self._tracer = self._provider.get_tracer("penstock", version)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[str, str], start: float, model: str) -> RequestTrace:
        """Begins a trace, or goes on with that of `traceparent` and `tracestate` among the headers. `model` is the name
        in it until the request's own model is known."""
        return RequestTrace(self, self._propagator.extract(headers), start, model)

    def send(
        self,
        request: RequestTrace,
        parent: Any,
        start: float,
        choices: list[tuple[float, RequestTiming]],
    ) -> None:
        """Hands the spans of a request, which ends now, to the thread that sends them."""
        now = time.monotonic()
        epoch = time.time() - now

        def at(moment: float) -> int:
            return int((epoch + min(max(moment, start), now)) * 1e9)

        name = " ".join(filter(None, (request.operation, request.model)))
        span = self._tracer.start_span(name, parent, self._api.SpanKind.SERVER, start_time=at(start))
        if span.is_recording():
            span.set_attributes(
                {
                    "gen_ai.provider.name": "penstock",
                    "gen_ai.operation.name": request.operation or "other",
                    "gen_ai.request.model": request.model,
                    **request.attributes,
                }
            )
            if "error.type" in request.attributes:
                span.set_status(self._api.StatusCode.ERROR)
            inside = self._api.set_span_in_context(span)
            for ended, timing in choices:
                moment = ended - timing.decode - timing.prefill - timing.queued
                where: dict[str, Any] = (
                    {"penstock.engine": timing.engine, "penstock.moves": timing.moves} if timing.engine else {}
                )
                for part in ("queued", "prefill", "decode"):
                    seconds = getattr(timing, part)
                    name = "queue" if part == "queued" else part
                    child = self._tracer.start_span(name, inside, start_time=at(moment), attributes=where)
                    moment += seconds
                    child.end(at(moment))
        span.end(at(now))

    def close(self) -> None:
        """Sends what is left, for a bounded time."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _asked(requests: list[GenerateRequest]) -> dict[str, Any]:
    """The parameters of a call. Prompts and stop strings are users' words, and stay out."""
    first, sampling = requests[0], requests[0].sampling
    asked = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
    }
    if (count := len(requests) * first.n) > 1:
        asked["gen_ai.request.choice.count"] = count
    return asked
