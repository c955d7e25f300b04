"""No command works for two seconds without output, also on a pipe."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ports import free_port
from tests.smollm2 import smollm2
from tests.weights.standin_hub import StandInHub, serving

MOST = 2.0  # seconds
TICK = 0.05  # ticks are counted, so that seconds in which this process was stopped are not
HUB_SECONDS = 3.0
NAME = "acme/SmolLM2-GGUF"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
ENGINE = ("--threads", "1", "--kv-cache-memory", "256MiB", "--max-model-len", "2048")
CASES = ("--cases", "4x256/64", "--runs", "1")


def slowness() -> float:
    """How much longer than alone a program takes on this machine now, at least 1."""
    began, worked = time.monotonic(), time.process_time()
    while time.process_time() < worked + 0.1:
        pass
    return max(1.0, (time.monotonic() - began) / 0.1)


pytestmark = pytest.mark.rare  # two minutes


class Watched:
    """A command with both outputs on one pipe, and the longest time in which nothing came."""

    def __init__(self, words: Sequence[str], environment: dict[str, str]) -> None:
        self.words = words
        self.output = b""
        self.gaps: list[tuple[float, bytes]] = []  # seconds, and what came before them
        self._ticks = 0
        self._slowness = slowness()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def until(self, text: bytes | None) -> None:
        """Returns when `text` is in the output, or at its end."""
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        while text is None or text not in self.output:
            if not select.select([stream], [], [], TICK)[0]:
                self._ticks += 1
                continue
            new = os.read(stream, 1 << 16)
            self.gaps.append((self._ticks * TICK, self.output[-80:]))
            self._ticks = 0
            if not new:
                break
            self.output += new

    def end(self, number: int | None = None) -> None:
        """Sends a signal, and waits for the end."""
        if number is not None:
            self._process.send_signal(number)
        self.until(None)
        self._process.wait(30)

    def check(self, status: int = 0) -> None:
        seconds, after = max(self.gaps)
        said = self.output.decode(errors="replace")
        assert self._process.returncode == status, said
        print(f"{' '.join(self.words[:2])}: {seconds:.1f} s, {self._slowness:.1f} times slower", sorted(self.gaps)[-4:])
        assert seconds <= MOST * self._slowness, f"{seconds:.1f} s without output after {after!r}\n{said}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def hub() -> Iterator[StandInHub]:
    with serving({FILE: smollm2().read_bytes()}, NAME) as hub:
        hub.delay = HUB_SECONDS
        yield hub


@pytest.fixture(scope="module")
def environment(hub: StandInHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With a hub that is slow, and a cache that is empty at first."""
    names = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**names, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path_factory.mktemp("home")), "OMP_NUM_THREADS": "1"}


@contextmanager
def watching(environment: dict[str, str], *words: str) -> Iterator[Watched]:
    command = Watched(words, environment)
    try:
        yield command
    finally:
        command.kill()


def run(environment: dict[str, str], *words: str, status: int = 0) -> str:
    with watching(environment, *words) as command:
        command.end()
        command.check(status)
        return command.output.decode()


def test_pull_and_the_commands_about_models(hub: StandInHub, environment: dict[str, str]) -> None:
    hub.stall_after[FILE] = 1 << 20
    with watching(environment, "pull", NAME) as command:
        command.until(b"waiting for http")
        command.until(b"1 of 98 MB")
        command.until(b" (5 s)")
        hub.go_on.set()
        command.end()
        command.check()
    assert NAME in run(environment, "list")
    assert "Apache-2.0" in run(environment, "show")
    assert "waiting for http" in run(environment, "plan", NAME)


def test_run(environment: dict[str, str]) -> None:
    said = run(environment, "run", NAME, "What is the capital of Germany?", "--temperature", "0", *ENGINE)
    assert "waiting for http" in said and "Berlin" in said
    run(
        environment, "run", "Go on: " + "one two three four five six seven eight. " * 180, "--max-tokens", "64", *ENGINE
    )


def test_batch(environment: dict[str, str], tmp_path: Path) -> None:
    lines = [
        {"custom_id": f"{i}", "url": "/v1/completions", "body": {"prompt": f"{i} apples and", "max_tokens": 64}}
        for i in range(16)
    ]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    said = run(environment, "batch", str(tmp_path / "requests.jsonl"), str(tmp_path / "answers.jsonl"), *ENGINE)
    assert "answered 16 requests" in said


def test_verify(environment: dict[str, str]) -> None:
    assert "problem" in run(environment, "verify", *ENGINE)


@pytest.mark.parametrize("command", ["throughput", "latency"])
def test_bench_of_cases(environment: dict[str, str], command: str) -> None:
    run(environment, "bench", command, *CASES, "--threads", "1")


def test_bench_quality(environment: dict[str, str]) -> None:
    run(environment, "bench", "quality", "--quantization", "int8", "--windows", "8", "--threads", "1")


def test_serve_bench_serve_and_replay(environment: dict[str, str], tmp_path: Path) -> None:
    port, log = str(free_port()), str(tmp_path / "events.jsonl")
    with watching(environment, "serve", NAME, "--port", port, "--event-log", log, *ENGINE) as server:
        server.until(b"Ctrl-C stops the server")
        load = ("--num-prompts", "24", "--input-len", "100-200", "--output-len", "30-60")
        run(environment, "bench", "serve", "--url", f"http://127.0.0.1:{port}", *load)
        server.gaps = [gap for gap in server.gaps if b"Ctrl-C stops" not in gap[1]]
        starting = server.gaps[:]
        server.end(signal.SIGTERM)
        server.gaps = starting
        server.check()
    assert "give the same" in run(environment, "replay", log)
