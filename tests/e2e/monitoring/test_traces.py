"""Traces arrive at a collector as OTLP, and a collector that does not answer delays nobody."""

import http.client
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.patience import AT_ONCE, PATIENCE, wait_for

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed: make test has it"
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

FLAGS = ("--kv-cache-memory", "64MiB", "--max-num-seqs", "8")
SECRET = "words of the user"


class Collector:
    """A collector that keeps the spans it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        received = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    received.resources.append(resource.resource)
                    for scope in resource.scope_spans:
                        received.spans += scope.spans
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def trace(self, trace_id: str, count: int) -> list[Any]:
        """The spans of a trace, once there are as many."""

        def found() -> list[Any]:
            return [span for span in self.spans if span.trace_id.hex() == trace_id]

        wait_for(lambda: len(found()) >= count, f"{count} spans of {trace_id}")
        return sorted(found(), key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log: Path = tmp_path_factory.mktemp("traces") / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with serving(log, *FLAGS, "--otlp-endpoint", collector.url) as server:
            yield server


def attributes(span: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(item) for item in found.values] if kind == "array_value" else found

    return {pair.key: value(pair.value) for pair in span.attributes}


def ask(
    server: Server, trace_id: str = "", flags: str = "01", path: str = "/v1/completions", **body: Any
) -> httpx.Response:
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-{flags}"} if trace_id else {}
    fields = {"prompt": f"# {SECRET}\ndef f", "max_tokens": 12, "ignore_eos": True, **body}
    return httpx.post(server.url + path, json=fields, headers={**headers, "x-request-id": "mine"}, timeout=PATIENCE)


def test_a_request_is_a_span_with_its_parts(traced: Server, collector: Collector) -> None:
    began = time.time_ns()
    answer = ask(traced, "a" * 32, temperature=0.5, top_p=1.0, stop=["never"]).json()
    request, *parts = collector.trace("a" * 32, 4)
    assert request.name == "text_completion python-8m" and request.kind == 2  # SERVER
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    found = attributes(request)
    assert answer["id"].endswith(found.pop("gen_ai.response.id"))
    assert found == {
        "gen_ai.provider.name": "penstock",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "python-8m",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "penstock.request_id": "mine",
    }
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert {part.parent_span_id for part in parts} == {request.span_id}
    queue, prefill, decode = parts
    assert began <= request.start_time_unix_nano <= queue.start_time_unix_nano
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano < prefill.end_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    assert decode.end_time_unix_nano <= request.end_time_unix_nano <= time.time_ns()
    (service,) = {attribute.value.string_value for resource in collector.resources
                  for attribute in resource.attributes if attribute.key == "service.name"}  # fmt: skip
    assert service == "penstock"


def test_streams_choices_stops_and_refusals(traced: Server, collector: Collector) -> None:
    assert ask(traced, "b" * 32, stream=True, n=2).text.endswith("data: [DONE]\n\n")
    request, *parts = collector.trace("b" * 32, 7)
    assert attributes(request)["gen_ai.request.choice.count"] == 2 and len(parts) == 6
    assert attributes(request)["gen_ai.usage.output_tokens"] == 24
    text = ask(traced, "c" * 32, temperature=0).json()["choices"][0]["text"]
    stopped = ask(traced, "d" * 32, temperature=0, stop=text[4:6]).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    request, *parts = collector.trace("d" * 32, 4)
    assert attributes(request)["gen_ai.response.finish_reasons"] == ["stop"] and len(parts) == 3
    assert ask(traced, "e" * 32, max_tokens=-1).status_code == 400
    (request,) = collector.trace("e" * 32, 1)
    assert attributes(request)["http.response.status_code"] == 400 and request.status.code == 0


def test_the_parent_decides_what_is_sampled(traced: Server, collector: Collector) -> None:
    assert ask(traced, "1" * 32, flags="00").status_code == 200
    assert ask(traced, "x" * 4000).status_code == 200  # not a traceparent: a new trace
    assert ask(traced, "2" * 32).status_code == 200
    collector.trace("2" * 32, 4)
    assert not [span for span in collector.spans if span.trace_id.hex() == "1" * 32]
    assert [span for span in collector.spans if span.name.startswith("text_completion") and not span.parent_span_id]


def test_no_span_has_a_users_words(traced: Server, collector: Collector) -> None:
    ask(traced, "f" * 32, path="/v1/chat/completions", messages=[{"role": "user", "content": SECRET}])
    collector.trace("f" * 32, 1)
    assert collector.spans and SECRET not in str(collector.spans) and "never" not in str(collector.spans)


@pytest.mark.rare  # a server of its own, and its end waits
def test_a_collector_that_does_not_answer_delays_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with serving(tmp_path / "log", *FLAGS, "--otlp-endpoint", endpoint) as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            slowest = 0.0
            for _ in range(40):  # 160 spans: more than the queue holds
                began = time.monotonic()
                body = json.dumps({"prompt": "a", "max_tokens": 1})
                connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                assert answer.status == 200 and answer.read()
                slowest = max(slowest, time.monotonic() - began)
            assert slowest < 5  # the collector's time-out is 10
            connection.close()
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE) == 0
            assert time.monotonic() - began < AT_ONCE
