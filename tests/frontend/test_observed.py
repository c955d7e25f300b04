"""What requests leave in metrics and logs: numbers and names, never what a user wrote."""

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.config import ServerConfig
from penstock.frontend import ServedModel, create_app
from penstock.frontend.requests.sampling import PROMPT_SPACING
from tests.frontend.conftest import Site
from tests.frontend.scripted import ScriptedClient
from tests.frontend.test_other_wires import EMBEDS

SECRET = "the users own words"
CHAT = {"messages": [{"role": "user", "content": SECRET}], "user": SECRET, "cache_salt": SECRET}


async def scrape(site: Site) -> tuple[dict[tuple[str, ...], float], str]:
    """Samples by name and label values, and the whole text."""
    text = (await site.http.get("/metrics")).text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }, text


async def test_metrics_of_requests(site: Site) -> None:
    ids = site.says("hello stop world")
    await site.post("/v1/completions", prompt=[60, 61, 62], n=2, max_tokens=4)
    await site.events("/v1/chat/completions", **CHAT, stop="stop")
    await site.http.post("/v1/chat/completions", json={**CHAT, "n": 0})
    await site.http.get(f"/{SECRET}")
    samples, text = await scrape(site)
    chat, completion = site.engine.requests[1], site.engine.requests[0]
    prompt_tokens = len(chat.prompt_ids) + len(completion.prompt_ids)
    kept = site.engine.finished[0][3]
    assert kept < len(ids)
    for prefix in ("penstock_", "vllm:"):
        assert samples[f"{prefix}prompt_tokens_total", "tiny"] == prompt_tokens
        assert samples[f"{prefix}generation_tokens_total", "tiny"] == 2 * 4 + kept
        assert samples[f"{prefix}request_success_total", "length", "tiny"] == 2
        assert samples[f"{prefix}request_success_total", "stop", "tiny"] == 1
        assert samples[f"{prefix}request_success_total", "abort", "tiny"] == 0
        assert samples[f"{prefix}time_to_first_token_seconds_count", "tiny"] == 2
        assert samples[f"{prefix}e2e_request_latency_seconds_count", "tiny"] == 2
        assert samples[f"{prefix}inter_token_latency_seconds_count", "tiny"] == 2 * 3 + kept - 1
        assert samples[f"{prefix}request_queue_time_seconds_sum", "tiny"] == 1.5
        assert samples[f"{prefix}num_preemptions_total", "tiny"] == 3
        assert samples[f"{prefix}kv_cache_usage_perc", "tiny"] == 0.25
    for operation in ("chat", "text_completion"):
        assert samples["gen_ai_server_request_duration_seconds_count", operation, "penstock", "tiny"] == 1
    requests = {key[1:]: value for key, value in samples.items() if key[0] == "penstock_http_requests_total"}
    assert requests == {
        ("200", "POST", "/v1/completions"): 1,
        ("200", "POST", "/v1/chat/completions"): 1,
        ("400", "POST", "/v1/chat/completions"): 1,
        ("404", "GET", "other"): 1,
    }
    assert SECRET not in text
    assert SECRET.split()[1] not in text


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines about requests."""
    return [record.fields for record in caplog.records if record.name == "penstock.access"]  # type: ignore[attr-defined]


async def test_the_line_of_a_request_says_what_it_cost(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.says("hello stop world")
    with caplog.at_level(logging.INFO, "penstock.access"):
        await site.post("/v1/completions", prompt=[60, 61, 62], n=2, max_tokens=2)
        await site.events("/v1/chat/completions", **CHAT, stop="stop")
        messages = {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 2}
        await site.http.post("/v1/messages", json={**messages, "stream": True})
        site.engine.row_error_after = 0
        await site.http.post("/v1/completions", json={"prompt": "x"})
        await site.http.get("/v1/models")
    lines = lines_of(caplog)
    assert [line["model"] for line in lines[:4]] == ["tiny"] * 4
    counts = ("prompt_tokens", "completion_tokens", "finish_reason")
    assert tuple(lines[0][name] for name in counts) == (3, 4, "length,length")
    assert lines[1]["finish_reason"] == "stop" and lines[1]["first_token_seconds"] >= 0
    assert lines[2]["finish_reason"] == "length" and lines[2]["completion_tokens"] == 2
    assert (lines[3]["status"], lines[3]["finish_reason"]) == (500, "error")
    assert "model" not in lines[4]
    assert SECRET not in str(lines)


async def test_the_line_of_a_request_for_vectors(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture
) -> None:
    site = make_site(pooling=EMBEDS)
    with caplog.at_level(logging.INFO, "penstock.access"):
        for path, body in {
            "/v1/embeddings": {"input": ["hello", "x"]},
            "/api/embed": {"model": "tiny", "input": "hello"},
            "/score": {"text_1": "x", "text_2": ["y", "z"]},
        }.items():
            assert (await site.http.post(path, json=body)).status_code == 200
    lines = lines_of(caplog)
    assert [line["model"] for line in lines] == ["tiny"] * 3
    assert [line["prompt_tokens"] > 1 for line in lines] == [True] * 3


async def test_prompts_of_one_request_take_places_one_after_the_other(site: Site) -> None:
    await site.post("/v1/completions", prompt=["a", "b", "c"], max_tokens=1)
    assert [request.behind for request in site.engine.requests] == [0.0, PROMPT_SPACING, 2 * PROMPT_SPACING]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 60, 140), (1.0, 200, 200)])
async def test_a_share_of_the_requests_is_logged_and_every_error(
    make_site: Callable[..., Site], caplog: pytest.LogCaptureFixture, share: float, least: int, most: int
) -> None:
    site = make_site(access_log=share)
    with caplog.at_level(logging.INFO, "penstock.access"):
        for _ in range(200):
            await site.http.get("/v1/models")
        await site.http.get("/nothing")
    statuses = [line["status"] for line in lines_of(caplog)]
    assert statuses.count(404) == 1 and least <= statuses.count(200) <= most


async def test_a_refused_request_is_in_no_latency(site: Site) -> None:
    site.engine.row_error_after = 0
    assert (await site.http.post("/v1/completions", json={"prompt": "x", "n": 3})).status_code == 500
    samples, _ = await scrape(site)
    assert samples["vllm:request_success_total", "error", "tiny"] == 3
    assert samples["vllm:e2e_request_latency_seconds_count", "tiny"] == 0


async def test_a_log_line_for_every_request_but_probes(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "penstock")
    await site.post("/v1/chat/completions", **CHAT)
    await site.http.post("/v1/chat/completions", json={**CHAT, "temperature": -1})
    await site.http.get("/health")
    await site.http.get("/metrics")
    site.engine.refusal = ZeroDivisionError("a bug")
    await site.http.post("/v1/completions", json={"prompt": SECRET}, headers={"x-request-id": "mine"})
    lines = [record.fields for record in caplog.records if record.name == "penstock.access" and record.msg == "request"]
    assert [(line["method"], line["path"], line["status"]) for line in lines] == [
        ("POST", "/v1/chat/completions", 200),
        ("POST", "/v1/chat/completions", 400),
        ("POST", "/v1/completions", 500),
    ]
    assert lines[-1]["request_id"] == "mine"
    (failure,) = [record for record in caplog.records if record.exc_info]
    assert failure.fields == {"request_id": "mine"}
    assert SECRET not in caplog.text


async def test_a_log_line_has_the_client_and_the_path_of_a_404(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    await site.http.get("/v1/chat/completion?api_key=sk-1234")
    await site.http.get("/v1/models/%0a12:00:00%20INFO%20forged%1b[31m")
    await site.http.get("/" + "x" * 5000)
    await site.app(
        {
            "type": "http",
            "method": "GET",
            "path": "/\x1b[2J\u202e",
            "headers": [(b"host", b"localhost")],
            "client": None,
        },
        None,
        Ignore(),
    )
    lines = [record.fields for record in caplog.records if record.msg == "request"]
    assert [line["status"] for line in lines] == [404] * 4
    assert lines[0]["client"] == "127.0.0.1:123"  # as httpx gives it
    assert lines[0]["path"] == "/v1/chat/completion"
    assert lines[1]["path"] == "/v1/models/%0a12:00:00%20INFO%20forged%1b[31m"
    assert lines[2]["path"] == "/" + "x" * 199 + "…"
    assert (lines[3]["client"], lines[3]["path"]) == ("unknown", r"/\x1b[2J\xe2\x80\xae")
    assert "sk-1234" not in str(lines)


class Ignore:
    """Takes an answer and drops it."""

    async def __call__(self, message: object) -> None:
        pass


async def test_traces_name_the_model_that_answered(site: Site) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from penstock.observe.tracing import Tracer

    tracer, spans = Tracer("http://127.0.0.1:1", "1"), InMemorySpanExporter()
    tracer._provider.add_span_processor(SimpleSpanProcessor(spans))
    app = create_app(site.app.models, ServerConfig(state_dir="none"), site.metrics, tracer=tracer)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
            await http.post("/v1/completions", json={"prompt": "x"})
            engine = ScriptedClient(lambda request, choice: [1], vocab_size=site.engine.info.vocab_size, eos=0)
            site.serving.exchange(ServedModel(name="renamed", client=engine, tokenizer=site.tokenizer, created=1))
            await http.post("/v1/completions", json={"prompt": "x"})
            await http.post("/v1/completions", json={"prompt": 1})
    finally:
        tracer.close()
    requests = [span for span in spans.get_finished_spans() if not span.parent]
    assert [(span.name, span.attributes["gen_ai.request.model"]) for span in requests] == [
        ("text_completion tiny", "tiny"),
        ("text_completion renamed", "renamed"),
        ("renamed", "renamed"),
    ]
