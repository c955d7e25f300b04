"""`penstock bench serve` where there is nothing to load, or nothing that could be sent."""

import socket
from dataclasses import replace

import pytest

from penstock.cli.bench import Load, online

LOAD = Load(1, "8", "4", 0, 100, None, 1.0, None, None, 0)


def test_where_no_server_answers_the_user_is_asked_whether_one_runs() -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        with pytest.raises(
            ValueError, match=rf"--url {url} does not list its models .*Cannot connect.*: is a server running"
        ):
            online(url, None, None, LOAD, None)
    with pytest.raises(ValueError, match="--url localhost is not an address: write --url http://localhost"):
        online("localhost", None, None, LOAD, None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_are_above_0(value: float) -> None:
    with pytest.raises(ValueError, match=r"--request-rate is .*: give a number above 0"):
        online("http://127.0.0.1:9", None, None, replace(LOAD, request_rate=value), None)
    with pytest.raises(ValueError, match=r"--burstiness is .*: give a number above 0"):
        online("http://127.0.0.1:9", None, None, replace(LOAD, burstiness=value), None)
