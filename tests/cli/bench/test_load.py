"""`penstock bench serve` where there is nothing to load, or nothing that could be sent: the error is one line."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.cli.bench.commands import Load, online
from penstock.cli.top.scrape import NoServer

LOAD = Load(3, "8", "4", 0, 100, None, 1.0, None, None, 0)


@contextlib.contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """The address of a server that answers everything with this."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_where_no_server_answers_the_user_is_asked_whether_one_runs() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(NoServer, match=rf"^--url {url} does not answer \(Connection refused\): is a server runn"):
            online(url, None, None, LOAD, None)
    with pytest.raises(NoServer, match=r"^--url http://no\.such\.host\.invalid does not answer \([^()]*\): is a"):
        online("http://no.such.host.invalid", None, None, LOAD, None)
    with pytest.raises(
        ValueError, match=r"^--url is 'localhost', which is not an address: write --url http://localhost$"
    ):
        online("localhost", None, None, LOAD, None)


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"", "status 401; set PENSTOCK_API_KEY to a key that it accepts"),
        (404, b"", "status 404; give the address of a server with OpenAI's API, without a path"),
        (503, b"", "status 503, Service Unavailable"),
        (200, b"<html>", "is a server running there"),
        (200, b"[]", "is a server running there"),
        (200, b'{"data": []}', "is a server running there"),
    ],
)
def test_a_server_that_lists_no_models(status: int, body: bytes, words: str) -> None:
    with answering(status, body) as url, pytest.raises(NoServer) as caught:
        online(url, None, None, LOAD, None)
    message = str(caught.value)
    assert message.startswith(f"--url {url} does not list its models") and words in message and "\n" not in message


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": {"message": "no valid API key;\\n send it", "type": "x"}}', "no valid API key; send it"),
        (b'{"error": "quota"}', "quota"),
        (b"<html>\n<p>\xff", "<html> <p>�"),
    ],
)
def test_where_every_request_fails_the_reason_is_one_line(
    body: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(401, body) as url, pytest.raises(SystemExit) as end:
        online(url, "some-model", None, LOAD, None)
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (1, "")
    assert said.err == f"penstock: all 3 requests failed: status 401: {words}\n"


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_are_above_0(value: float) -> None:
    with pytest.raises(ValueError, match=r"--request-rate is .*: give a number above 0"):
        online("http://127.0.0.1:9", None, None, replace(LOAD, request_rate=value), None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_burstiness_is_above_0(value: float) -> None:
    with pytest.raises(ValueError, match=r"--burstiness is .*: give a number above 0, or inf for equal gaps"):
        online("http://127.0.0.1:9", None, None, replace(LOAD, burstiness=value), None)
