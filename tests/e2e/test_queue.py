"""The queue of a real server, with more clients than it can serve at a time."""

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, gauge, serving
from tests.patience import PATIENCE, wait_for

MOST = 1  # --max-priority
REFUSED = "penstock_requests_refused_total"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that computes two sequences at a time, and lets few requests wait."""
    log: Path = tmp_path_factory.mktemp("queue") / "log"
    flags = ("--max-num-seqs", "2", "--kv-cache-memory", "64MiB", "--max-priority", str(MOST))
    with serving(log, *flags, "--max-waiting", "12", "--max-waiting-tokens", "2000", "--speculation", "off") as running:
        yield running


class Clients:
    """Clients that each send the same request again and again, as long as the block lasts."""

    def __init__(self, server: Server, count: int, **fields: object) -> None:
        self.answers = 0
        self.statuses: set[int] = set()
        self.refusals: list[httpx.Response] = []
        self._url = server.url + "/v1/completions"
        self._fields = fields
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Let each client end with its current request."""
        self._stop.set()

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self) -> None:
        with httpx.Client(timeout=PATIENCE) as http:
            while not self._stop.is_set():
                answer = http.post(self._url, json=self._fields)
                self.statuses.add(answer.status_code)
                self.answers += 1
                if answer.status_code == 429:
                    self.refusals.append(answer)
                    time.sleep(0.05)


def test_twelve_clients_of_the_highest_priority_do_not_starve_one_of_the_lowest(narrow: Server) -> None:
    with Clients(narrow, 12, prompt="def f(", max_tokens=96, ignore_eos=True, priority=-MOST) as clients:
        wait_for(lambda: gauge(narrow.get("/metrics").text, "penstock_num_requests_waiting") >= 8, "a queue")
        start = time.monotonic()
        answer = narrow.post("/v1/completions", {"prompt": "1 +", "max_tokens": 4, "priority": MOST})
        waited = time.monotonic() - start
    assert answer.status_code == 200
    assert clients.statuses == {200}
    # 2 MOST seconds for those that came later, and the time of those that were due before them.
    assert waited < 2 * MOST + PATIENCE / 2


def test_a_request_of_higher_priority_takes_a_place_that_is_taken(narrow: Server) -> None:
    fields: dict[str, object] = {"max_tokens": 600, "ignore_eos": True, "temperature": 0, "priority": MOST}

    def ask(texts: dict[int, str]) -> list[threading.Thread]:
        def one(number: int) -> None:
            answer = narrow.post("/v1/completions", {**fields, "prompt": f"def f{number}("})
            texts[number] = answer.json()["choices"][0]["text"]

        threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(2)]
        for thread in threads:
            thread.start()
        wait_for(lambda: gauge(narrow.get("/metrics").text, "penstock_num_requests_running") == 2, "both")
        return threads

    undisturbed: dict[int, str] = {}
    texts: dict[int, str] = {}
    for thread in ask(undisturbed):
        thread.join(PATIENCE)
    preempted = gauge(narrow.get("/metrics").text, "penstock_num_preemptions_total")
    threads = ask(texts)
    hurried = narrow.post("/v1/completions", {"prompt": "1 +", "max_tokens": 2, "priority": -MOST})
    assert hurried.status_code == 200 and not texts
    for thread in threads:
        thread.join(PATIENCE)
    assert texts == undisturbed
    assert gauge(narrow.get("/metrics").text, "penstock_num_preemptions_total") == preempted + 1


def test_a_priority_out_of_range_is_refused_by_name(narrow: Server) -> None:
    answer = narrow.post("/v1/completions", {"prompt": "1 +", "priority": -2147483647})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "priority")
    assert "from -1 to 1 (--max-priority)" in error["message"]


def test_a_full_queue_refuses_at_once(narrow: Server) -> None:
    refused, begin = gauge(narrow.get("/metrics").text, REFUSED), len(narrow.log.read_text())
    with Clients(narrow, 30, prompt="def f(", max_tokens=96, ignore_eos=True) as clients:
        wait_for(lambda: len(clients.refusals) >= 50 and 200 in clients.statuses, "refusals")
    assert clients.statuses == {200, 429}
    for refusal in clients.refusals:
        assert refusal.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refusal.headers["retry-after"]) <= 120
    log = narrow.log.read_text()[begin:]
    seconds, others = (
        sorted(float(found) for found in re.findall(rf"/v1/completions .*status={status} seconds=([\d.]+)", log))
        for status in (429, 200)
    )
    assert len(seconds) == len(clients.refusals)
    assert seconds[len(seconds) * 9 // 10] < others[len(others) // 2] / 4  # those wait for others, and are computed
    metrics = narrow.get("/metrics").text
    assert gauge(metrics, REFUSED) == refused + len(seconds)
    assert gauge(metrics, "penstock_num_tokens_waiting") == 0


def test_a_queue_is_bounded_in_tokens(narrow: Server) -> None:
    long = {"prompt": [7] * 1500, "max_tokens": 1}
    answers: list[httpx.Response] = []

    def refused() -> bool:
        # Between two requests of the clients the queue may be short, so one request says little.
        answers.append(narrow.post("/v1/completions", long))
        return answers[-1].status_code == 429

    with Clients(narrow, 4, prompt=[7] * 900, max_tokens=24, ignore_eos=True, seed=1) as clients:
        wait_for(refused, "a refusal")
    assert 200 in clients.statuses
    assert {answer.status_code for answer in answers[:-1]} <= {200}
    assert "--max-waiting-tokens" in answers[-1].json()["error"]["message"]
    assert narrow.post("/v1/completions", long).status_code == 200


LONG_STEPS = 3000
LONG = {"prompt": "def f(", "max_tokens": LONG_STEPS // 2, "n": 4, "ignore_eos": True}  # two choices at a time


def late_requests(server: Server) -> float:
    return gauge(server.get("/metrics").text, "penstock_requests_late_total")


def nothing_runs(server: Server) -> bool:
    return gauge(server.get("/metrics").text, "penstock_num_requests_running") == 0


def steps(server: Server) -> float:
    return gauge(server.get("/metrics").text, "penstock_engine_steps_total")


@pytest.mark.parametrize("way", ["header", "parameter"])
def test_an_answer_ends_at_its_deadline(narrow: Server, way: str) -> None:
    before, steps_before, start = late_requests(narrow), steps(narrow), time.monotonic()
    headers = {"X-Request-Timeout": "0.6"} if way == "header" else {}
    body = LONG if way == "header" else {**LONG, "timeout": 0.6}
    answer = httpx.post(narrow.url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE)
    assert time.monotonic() - start > 0.5
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert late_requests(narrow) == before + 1
    wait_for(lambda: nothing_runs(narrow), "the engine to stop")
    assert steps(narrow) - steps_before < LONG_STEPS, "the engine went on to the end"


def test_a_stream_that_has_begun_ends_with_an_event(narrow: Server) -> None:
    start = time.monotonic()
    narrow.post("/v1/completions", {"prompt": "def f(", "max_tokens": 8, "ignore_eos": True})
    seconds = max(0.8, 10 * (time.monotonic() - start))  # a busy machine needs more for the first tokens
    steps_before, body = steps(narrow), {**LONG, "stream": True, "timeout": seconds}
    with httpx.stream("POST", narrow.url + "/v1/completions", json=body, timeout=PATIENCE) as answer:
        assert answer.status_code == 200
        lines = [line for line in answer.iter_lines() if line]
    assert len(lines) > 5
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: nothing_runs(narrow), "the engine to stop")
    assert steps(narrow) - steps_before < LONG_STEPS, "the engine went on to the end"


def test_what_waits_too_long_for_its_first_token_is_given_up(narrow: Server) -> None:
    with Clients(narrow, 2, **{**LONG, "max_tokens": 800}) as clients:  # each goes on to its end
        wait_for(lambda: gauge(narrow.get("/metrics").text, "penstock_num_requests_running") == 2, "two to run")
        start = time.monotonic()
        answer = narrow.post("/v1/completions", {"prompt": "1 +", "max_tokens": 4, "first_token_timeout": 0.5})
        waited = time.monotonic() - start
        assert clients.answers == 0, "the others ended first"
        clients.stop()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert waited > 0.4


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf", "1" * 40])
def test_a_wrong_header_is_named(narrow: Server, value: str) -> None:
    headers = {"X-Request-Timeout": value}
    answer = httpx.post(narrow.url + "/v1/completions", json={"prompt": "1 +"}, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"
