"""`penstock serve --api-processes 2`: streams, faults, metrics and stored state, whichever process answers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import httpx
import pytest

from penstock.weights.packaged import EMBEDDED
from tests.e2e.bound import bound
from tests.e2e.server import Server, gauge, serving
from tests.engine.processes import alive, children, command_line
from tests.patience import PATIENCE, wait_for

STREAMS, TOKENS = 32, 150  # enough to be running still when a fault comes, also on a busy machine
FLAGS = ("--api-processes", "2", "--max-num-seqs", "64", "--kv-cache-memory", "64MiB", "--max-model-len", "1024")
FLAGS += ("--speculation", "off")  # drafts from earlier answers would end streams before all run at once
FLAGS += ("--drain-timeout", f"{PATIENCE:g}")  # a busy machine needs longer than usual


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    with serving(folder / "log", *FLAGS, "--state-dir", str(folder / "state")) as running:
        yield running


def api_pids(server: Server) -> list[int]:
    return [pid for pid in children(server.process.pid) if "api_process" in command_line(pid)]


def engine_pid(server: Server) -> int:
    (pid,) = set(children(server.process.pid)) - set(api_pids(server))
    return pid


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE) as answer:  # needs no TLS context
        return gauge(answer.read().decode(), f"penstock_{name}")


async def stream(server: Server, seed: int, tokens: int = TOKENS) -> tuple[str, str]:
    """The text of a sampled stream, and how it ended. Each has a connection of its own, and so perhaps another
    process."""
    text = ""
    body = {"prompt": "import os\n", "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": seed}
    async with httpx.AsyncClient(timeout=PATIENCE, verify=False) as client:
        try:
            async with client.stream("POST", server.url + "/v1/completions", json={**body, "temperature": 1}) as answer:
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return text, "done"
                    if line:
                        text += json.loads(line[6:])["choices"][0]["text"]
        except httpx.RemoteProtocolError:
            return text, "closed"
    return text, "cut"


async def reaches(server: Server, name: str, least: float) -> None:
    """Waits in another thread, so that the streams of this one are read meanwhile."""
    async with asyncio.timeout(PATIENCE):
        while await asyncio.to_thread(metric, server, name) < least:
            await asyncio.sleep(0.02)


async def streams_through(server: Server, fault: signal.Signals | None, pid: int) -> list[tuple[str, str]]:
    """All streams; a process gets the signal while they run."""
    generated = metric(server, "generation_tokens_total")
    tasks = [asyncio.create_task(stream(server, seed)) for seed in range(STREAMS)]
    await reaches(server, "generation_tokens_total", generated + STREAMS * TOKENS / 30)
    if fault is not None:
        os.kill(pid, fault)
    return await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[tuple[str, str]]:
    return asyncio.run(streams_through(server, None, 0))


def test_both_processes_stream(server: Server, undisturbed: list[tuple[str, str]]) -> None:
    assert {end for _, end in undisturbed} == {"done"} and len({text for text, _ in undisturbed}) > STREAMS / 2
    log = server.log.read_text()
    assert "api-0: request" in log and "api-1: request" in log


def test_streams_go_on_when_the_engine_is_killed(server: Server, undisturbed: list[tuple[str, str]]) -> None:
    restarts = metric(server, "engine_restarts_total")
    assert asyncio.run(streams_through(server, signal.SIGKILL, engine_pid(server))) == undisturbed
    wait_for(lambda: metric(server, "engine_restarts_total") == restarts + 1, "the restart to be counted")


def test_only_its_clients_see_that_a_process_is_killed(server: Server, undisturbed: list[tuple[str, str]]) -> None:
    before, pids = metric(server, "generation_tokens_total"), api_pids(server)
    found = asyncio.run(streams_through(server, signal.SIGKILL, pids[1]))
    assert {end for _, end in found} == {"done", "closed"}
    for got, whole in zip(found, undisturbed, strict=True):
        assert got == whole if got[1] == "done" else whole[0].startswith(got[0])
    wait_for(lambda: len(api_pids(server)) == 2, "another process")
    assert [pids[0]] == [pid for pid in api_pids(server) if pid in pids]
    for _ in range(20):  # connections of the process that ended reach the new one
        assert server.get("/readyz").status_code == 200
    wait_for(lambda: not metric(server, "num_requests_running"), "the requests of the process to be aborted")
    assert metric(server, "generation_tokens_total") > before + STREAMS * TOKENS / 30


def test_a_process_counts_that_was_asked_for_its_counts_when_it_started(server: Server) -> None:
    name, posts, begin = "generation_tokens_total", 0, len(server.log.read_text())
    tokens, pids = metric(server, name), api_pids(server)
    os.kill(pids[1], signal.SIGKILL)
    wait_for(lambda: len(set(api_pids(server)) - {pids[1]}) == 2, "another process")
    metric(server, name)  # the other process asks for it, as the new one does not answer yet
    while "api-1: request" not in server.log.read_text()[begin:]:
        assert posts < 1000
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True}).raise_for_status()
        posts += 1
    assert metric(server, name) == tokens + 3 * posts


def test_a_client_that_goes_ends_its_request(server: Server) -> None:
    async def leave() -> None:
        tasks = [asyncio.create_task(stream(server, seed, tokens)) for seed in range(8)]
        await reaches(server, "num_requests_running", 8)
        for task in tasks:
            task.cancel()

    steps, tokens = metric(server, "engine_steps_total"), 900
    asyncio.run(leave())
    wait_for(lambda: not metric(server, "num_requests_running"), "the requests to be aborted")
    assert metric(server, "engine_steps_total") < steps + tokens, "the requests went on to their end"


def test_metrics_are_one_sum(server: Server) -> None:
    """Each GET has a connection of its own, and so the kernel's choice of a process."""
    name, answered = "generation_tokens_total", 'http_requests_total{code="200",method="GET",route="/metrics"}'
    tokens, asked = metric(server, name), metric(server, answered)
    for i in range(10):
        server.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "ignore_eos": True}).raise_for_status()
        assert metric(server, name) == tokens + 3 * (i + 1)
        assert server.get("/server_load").json()["counters"]["generation_tokens"] == tokens + 3 * (i + 1)
    assert metric(server, answered) == asked + 11
    assert metric(server, "http_requests_in_flight") == 0


def test_state_is_shared(server: Server) -> None:
    """A batch whose file, job and answers are asked for over many connections."""
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 4}}
    lines = "\n".join(json.dumps({**line, "custom_id": str(i)}) for i in range(20))
    uploaded = httpx.post(
        server.url + "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", lines)}, timeout=PATIENCE
    ).json()
    fields = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batches = [server.post("/v1/batches", fields).json()["id"] for _ in range(6)]

    def complete() -> bool:
        found = [server.get(f"/v1/batches/{batch}").json() for batch in batches]
        return all(batch["status"] == "completed" and batch["request_counts"]["completed"] == 20 for batch in found)

    wait_for(complete, "the batches")


def test_operators_routes(server: Server) -> None:
    assert server.post("/sleep", {}).json() == {"is_sleeping": True}
    assert all(server.get("/is_sleeping").json()["is_sleeping"] for _ in range(6))
    assert server.post("/wake_up", {}).json() == {"is_sleeping": False}
    assert "nothing has changed" in server.post("/reload", {}).json()["message"]  # test_reload.py has the rest


def test_sigterm_to_the_group_lets_streams_finish(server: Server) -> None:
    """The last test: it ends the server."""
    group = [server.process.pid, *children(server.process.pid)]

    async def ended() -> list[tuple[str, str]]:
        tasks = [asyncio.create_task(stream(server, seed, 480)) for seed in range(STREAMS)]
        await reaches(server, "num_requests_running", STREAMS)
        os.killpg(server.process.pid, signal.SIGTERM)
        return await asyncio.gather(*tasks)

    assert {end for _, end in asyncio.run(ended())} == {"done"}
    assert server.process.wait(PATIENCE) == 0
    assert not any(map(alive, group))


def test_a_state_folder_that_cannot_be_used_is_named() -> None:
    """/proc takes no folders, not even root's."""
    flags = ("--api-processes", "2", "--state-dir", "/proc/no-folder", "--port", "0")
    command = bound([sys.executable, "-m", "penstock", "serve", EMBEDDED, *flags])
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    assert "--state-dir is '/proc/no-folder': it cannot be used: no such file or directory" in done.stderr
