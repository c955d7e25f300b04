"""Figures of `penstock top`, from scrapes whose answers are known."""

import io
import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from threading import Thread

import pytest
from rich.console import Console

from penstock.cli.top.figures import ScrapeDifference, quantiles
from penstock.cli.top.scrape import NoServer, Scrape, parse, scrape, server_url
from penstock.cli.top.screen import screen
from penstock.observe.histogram import Histogram

HEALTHY = 'penstock_engine_healthy{model_name="m"} 1\n'


def at(moment: float, text: str) -> Scrape:
    return Scrape(moment, parse(HEALTHY + text).samples)


def test_percentiles_are_those_of_the_values_within_a_bucket() -> None:
    bounds = [0.01 * 1.3**i for i in range(30)]
    histogram, values = Histogram(bounds), sorted(random.Random(3).expovariate(5) for _ in range(5000))
    for value in values:
        histogram.observe(value)
    found = quantiles({float(bound): count for bound, count in histogram.buckets()})
    assert found is not None
    for percentile, value in zip((0.5, 0.95, 0.99), found, strict=True):
        exact = values[int(percentile * len(values))]
        width = next(high / low for low, high in pairwise(bounds) if high >= exact)
        assert exact / width <= value <= exact * width


def test_percentiles_at_the_ends() -> None:
    assert quantiles({}) is None
    assert quantiles({1.0: 0.0, float("inf"): 0.0}) is None
    assert quantiles({1.0: 100.0, float("inf"): 100.0}) == pytest.approx((0.5, 0.95, 0.99))
    assert quantiles({1.0: 0.0, float("inf"): 7.0}) == (1.0, 1.0, 1.0)  # above the last bound: at least that


def test_what_happened_between_two_scrapes() -> None:
    before = at(10.0, 'penstock_generation_tokens_total{model_name="m"} 100\n')
    now = at(
        14.0,
        'penstock_generation_tokens_total{model_name="m"} 300\n'
        'penstock_prefix_cache_queries_total{model_name="m"} 50\n'
        'penstock_prefix_cache_hits_total{model_name="m"} 20\n'
        'penstock_engine_read_bytes_total{model_name="m"} 4e9\n'
        'penstock_machine_read_bytes_per_second{model_name="m"} 1e10\n'
        'penstock_generation_tokens_total{model_name="other"} 7\n',
    )
    period = ScrapeDifference("m", now, before, 4.0).period()
    assert period.output_rate == 50
    assert period.prefix_hits == pytest.approx(0.4)
    assert period.bandwidth == pytest.approx(0.1)
    assert (period.step, period.compute, period.first_token) == (None, None, None)
    # The counters of a server that was restarted begin at 0.
    assert ScrapeDifference("m", before, now, 4.0).period().output_rate == 25


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://host:1/metrics", "http://host:1"),
        ("https://host/", "https://host"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert server_url(text) == url


def test_a_name_cannot_control_the_terminal() -> None:
    now = Scrape(1.0, parse('penstock_engine_healthy{model_name="a\x1b]0;owned\x07[bold]"} 0\n').samples)
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=120)
    console.print(screen("http://x", now, None, "it\nfailed \x1b[2J"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in shown and "a␛]0;owned␇[bold]" in shown and "the engine does not serve" in shown


def test_several_models_have_a_line_each() -> None:
    text = "".join(
        f'penstock_engine_healthy{{model_name="{name}"}} {healthy}\n'
        f'penstock_engine_asleep{{model_name="{name}"}} {asleep}\n'
        f'penstock_num_requests_running{{model_name="{name}"}} {running}\n'
        f'penstock_generation_tokens_total{{model_name="{name}"}} {tokens}\n'
        for name, healthy, asleep, running, tokens in (("[bold]a", 1, 0, 3, 500), ("b", 1, 1, 0, 0), ("c", 0, 0, 0, 0))
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(screen("http://x", Scrape(20.0, parse(text).samples), Scrape(10.0, {})))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    rows = [line.split() for line in lines[2:6]]
    assert rows[0][:4] == ["model", "state", "running", "waiting"]
    assert rows[1] == ["[bold]a", "ready", "3", "0", "0.0%", "0.0", "50.0", "–"]
    assert [row[:2] for row in rows[2:]] == [["b", "asleep"], ["c", "down"]]


class Answers:
    """A server that answers GET /metrics with what a test tells it to."""

    def __init__(self) -> None:
        self.status, self.body, self.keys = 200, HEALTHY.encode(), list[str | None]()
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.keys.append(self.headers.get("authorization"))
                self.send_response(answers.status)
                self.end_headers()
                self.wfile.write(answers.body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture
def answers() -> Iterator[Answers]:
    found = Answers()
    thread = Thread(target=found.server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()


def test_the_key_is_sent(answers: Answers) -> None:
    assert scrape(answers.url, "secret").models == ["m"]
    assert scrape(answers.url, None).models == ["m"]
    assert answers.keys == ["Bearer secret", None]


def test_a_server_may_have_no_model_yet(answers: Answers) -> None:
    answers.body = b"penstock_http_requests_in_flight 1\n"
    found = scrape(answers.url, None)
    assert found.models == [] and found.value("penstock_http_requests_in_flight") == 1


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"", "status 401; set PENSTOCK_API_KEY"),
        (404, b"", "status 404: is it a Penstock server"),
        (200, b"<html>", "no metrics of Penstock"),
        (200, b'vllm:num_requests_running{model_name="m"} 1\n', "no metrics of Penstock"),
        (200, b"penstock_a{ 1\n", "cannot be read|no metrics of Penstock"),
        (200, b"#" * (17 << 20), "more than 16 MiB"),
    ],
)
def test_answers_that_are_not_a_penstock_servers(answers: Answers, status: int, body: bytes, words: str) -> None:
    answers.status, answers.body = status, body
    with pytest.raises(NoServer, match=words) as caught:
        scrape(answers.url, None)
    assert "\n" not in str(caught.value)
