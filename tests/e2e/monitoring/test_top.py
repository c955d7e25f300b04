"""`penstock top` on a real server, printed once and live on a terminal."""

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.cli.test_top import Answers
from tests.e2e.server import Server
from tests.e2e.terminal import CTRL_C, Terminal

TOP = (sys.executable, "-m", "penstock", "top")


def test_once_prints_what_the_server_does(server: Server) -> None:
    server.get("/metrics")  # measures the machine, as no request runs
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            server.post("/v1/completions", {"prompt": "def f", "max_tokens": 256, "ignore_eos": True})

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        done = subprocess.run(
            [*TOP, server.url, "--once", "--interval", "4"], capture_output=True, text=True, timeout=60
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert done.returncode == 0 and not done.stderr, done.stderr
    shown = done.stdout
    assert "python-8m  ready" in shown and "\x1b" not in shown
    assert re.search(r"batch .* [0-3] of 16, 0 waiting", shown)
    (rate,) = re.findall(r"tokens/s out +([\d.,]+)", shown)
    assert float(rate.replace(",", "")) > 0
    number = r"[\d.]+( [mµ]?s)?"
    assert re.search(rf"first token +{number} / {number} / [\d.]+ [mµ]?s", shown), shown
    assert re.search(r"tokens of a step .*[\d.]+ prefill \+ [1-3]\.\d decode", shown)
    assert re.search(r"memory bandwidth +[\d.]+%", shown) and re.search(r"compute +[\d.]+%", shown)


@pytest.mark.parametrize("key", [CTRL_C, "q"])
def test_live_until_a_key_ends_it(server: Server, tmp_path: Path, key: str) -> None:
    with Terminal("top", server.url, "--interval", "0.2", state=str(tmp_path)) as terminal:
        for _ in range(3):  # screens
            terminal.until("last ")
        terminal.press("x" + key)
        assert terminal.wait() == 0
        assert terminal.echoes()
    assert "Traceback" not in terminal.raw


def test_an_impatient_user_gets_the_shells_screen_back(server: Server, tmp_path: Path) -> None:
    with Terminal("top", server.url, "--interval", "0.2", state=str(tmp_path)) as terminal:
        terminal.until("tokens/s")
        assert terminal.hold(CTRL_C) == 0
    shown, switched, after = terminal.raw.rpartition("\x1b[?1049l")
    assert switched and "\x1b[?1049h" in shown and "tokens/s" not in after


def test_live_waits_for_a_server_that_went_away(tmp_path: Path) -> None:
    answers = Answers()
    thread = threading.Thread(target=answers.server.serve_forever, daemon=True)
    thread.start()
    with Terminal("top", answers.url, "--interval", "0.2", state=str(tmp_path)) as terminal:
        terminal.until("m  ready")
        answers.server.shutdown()
        answers.server.server_close()
        terminal.until("does not answer (Connection refused): is a server running")
        terminal.press(CTRL_C)
        assert terminal.wait() == 0
