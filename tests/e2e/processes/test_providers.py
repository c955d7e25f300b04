"""`penstock serve --providers` with two API processes: each reaches the providers, and counts are one sum."""

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes.test_api_processes import api_pids, metric
from tests.e2e.processes.test_tenants import Place
from tests.e2e.server import Server, serving
from tests.frontend.providers.streams import OPENAI_TEXT, SAID, sse
from tests.patience import PATIENCE, wait_for

TOKENS = 1050  # of each answer
TENANTS = f"""
tenants:
  limited:
    limits: {{tokens_per_month: {3 * TOKENS + 500}}}
  free: {{}}
"""


class FakeProvider:
    """Answers every request on loopback as OpenAI would, or with the status that a test has set."""

    def __init__(self) -> None:
        self.status = 200
        self.requests = 0
        outer = self

        class Answerer(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                outer.requests += 1
                body = sse(*OPENAI_TEXT) if outer.status == 200 else b'{"error": {"message": "out of order"}}'
                self.send_response(outer.status)
                self.send_header("content-type", "text/event-stream" if outer.status == 200 else "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Answerer)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def file(self, folder: Path, **more: object) -> str:
        """Writes a providers file that has this provider with the model `far`."""
        entry = {"url": f"http://127.0.0.1:{self.http.server_port}/v1", "private": True, "retries": 0, "concurrent": 3}
        models = {"far": {"model": "gpt-5-mini", "input": 1, "output": 2}}
        path = folder / "providers.yaml"
        path.write_text(json.dumps({"providers": {"there": {**entry, "models": models}}, **more}))
        return str(path)


@pytest.fixture(scope="module")
def provider() -> Iterator[FakeProvider]:
    fake = FakeProvider()
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture(autouse=True)
def working(provider: FakeProvider) -> None:
    provider.status = 200


@pytest.fixture(scope="module")
def place(provider: FakeProvider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A server without a model of its own, with tenants."""
    folder = tmp_path_factory.mktemp("providers")
    made = Place(folder, TENANTS, ("limited", "free"))
    flags = ("--api-processes", "2", "--providers", provider.file(folder))
    flags += ("--tenants", str(made.file), "--state-dir", str(folder / "state"))
    with serving(folder / "log", *flags, model=None) as made.server:
        yield made


async def ask(server: Server, key: str = "any", model: str = "far") -> httpx.Response:
    """The answer to a chat, over a connection of its own, and so perhaps from another process."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
    async with httpx.AsyncClient(timeout=PATIENCE, verify=False) as client:
        headers = {"authorization": f"Bearer {key}"}
        return await client.post(server.url + "/v1/chat/completions", json=body, headers=headers)


def ok(server: Server) -> float:
    return metric(server, 'provider_requests_total{provider="there",result="ok"}')


async def through_both(server: Server, key: str = "any") -> int:
    """Requests one after the other until both processes have answered some. Returns how many there were."""
    for number in range(1, 200):
        answer = await ask(server, key)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"] == SAID
        log = server.log.read_text()
        if "api-0: request" in log and "api-1: request" in log:
            return number
    raise AssertionError("one process got all connections")


async def test_counts_money_and_the_ledger_are_one_sum(place: Place) -> None:
    many = await through_both(place.server, place.keys["free"])
    assert ok(place.server) == many
    cost = metric(place.server, 'provider_cost_total{model_name="far",provider="there"}')
    assert cost == pytest.approx(many * (1000 * 1 + 50 * 2) / 1e6)
    assert metric(place.server, 'generation_tokens_total{model_name="far"}') == 50 * many
    assert metric(place.server, 'provider_up{provider="there"}') == 1
    load = httpx.get(
        place.server.url + "/server_load?model=far", headers={"authorization": f"Bearer {place.keys['free']}"}
    )
    assert load.json()["counters"]["generation_tokens"] == 50 * many
    wait_for(lambda: len(place.rows("free")) == many, "the rows")
    assert {row[:2] for row in place.rows("free")} == {(200, TOKENS)}


async def test_a_killed_process_leaves_its_counts_and_another_has_the_providers(place: Place) -> None:
    assert (await ask(place.server, place.keys["free"])).status_code == 200  # so there is a count
    before, pids = ok(place.server), api_pids(place.server)
    os.kill(pids[0], signal.SIGKILL)
    wait_for(lambda: len(set(api_pids(place.server)) - {pids[0]}) == 2, "another process")
    many = await through_both(place.server, place.keys["free"])
    assert ok(place.server) == before + many


async def test_a_quota_holds_for_both_processes_together(place: Place) -> None:
    statuses = Counter([(await ask(place.server, place.keys["limited"])).status_code for _ in range(12)])
    assert statuses == {200: 4, 429: 8}  # the fourth fits by its estimate, which is of its short prompt
    wait_for(lambda: len([1 for row in place.rows("limited") if row[0] == 200]) == 4, "the rows")


async def test_too_many_at_once_are_refused_by_each_process(provider: FakeProvider, place: Place) -> None:
    """Each process has two of the three requests at once: the share is rounded up."""
    answers = await asyncio.gather(*(ask(place.server, place.keys["free"]) for _ in range(40)))
    assert {answer.status_code for answer in answers} <= {200, 429}
    assert all("the limit is 2" in answer.text for answer in answers if answer.status_code == 429)


async def test_a_model_of_the_server_answers_for_a_provider_that_fails(provider: FakeProvider, tmp_path: Path) -> None:
    file = provider.file(tmp_path, fallbacks={"far": ["near"]})
    flags = ("--api-processes", "2", "--providers", file, "--served-model-name", "near", "--state-dir", "none")
    with serving(tmp_path / "log", *flags, "--kv-cache-memory", "64MiB", "--max-model-len", "512") as server:
        await through_both(server)
        provider.status, before = 500, provider.requests
        names = [(await ask(server)).json()["model"] for _ in range(30)]
        assert names == ["near"] * 30
        # Each process sends five before its circuit opens.
        tried = provider.requests - before
        assert 5 <= tried <= 10
        assert metric(server, 'provider_requests_total{provider="there",result="provider_failed"}') == tried
        assert metric(server, 'fallbacks_total{model_name="far",next="near"}') == 30
        assert metric(server, 'provider_up{provider="there"}') == 0
