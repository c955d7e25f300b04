"""Either process dies, or hangs: the other notices, every stream ends, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from penstock.engine.client import StreamingClient
from penstock.engine.link import ipc
from penstock.engine.link.ipc import spawn
from penstock.engine.signals import GROUP_SIGNALS
from penstock.messages import EngineError
from tests.engine.deserted import MOMENTS
from tests.engine.processes import alive, children, descriptors
from tests.engine.simulated import ENGINE, Scenario, ask, config, start
from tests.patience import AT_ONCE, until
from tests.schedule.simulated import request


@pytest.fixture
async def client(scratch: Path) -> AsyncIterator[StreamingClient]:
    client = await start("process", Scenario(step_seconds=0.005))
    yield client
    await client.close()
    assert not alive(client.info.pid)
    assert not list(scratch.iterdir())


async def consumers(client: StreamingClient, count: int) -> list[asyncio.Task[object]]:
    tasks = [asyncio.create_task(ask(client, request(f"r{i}", 6, 500))) for i in range(count)]
    await until(lambda: client.stats().running == 8, "requests to run")
    return tasks


async def expect_errors(tasks: list[asyncio.Task[object]], message: str) -> None:
    for task in tasks:
        with pytest.raises(EngineError, match=message):
            await task


# -- the engine dies --------------------------------------------------------------------------------------------------


async def test_a_killed_engine_ends_every_stream(client: StreamingClient, caplog: pytest.LogCaptureFixture) -> None:
    tasks = await consumers(client, 50)
    killed = time.monotonic()
    os.kill(client.info.pid, signal.SIGKILL)
    await until(lambda: client.state.status == "ended", "the client to notice", AT_ONCE)
    await expect_errors(tasks, "killed by SIGKILL")
    assert time.monotonic() - killed < AT_ONCE
    assert not Path(f"/proc/{client.info.pid}").exists(), "it has been reaped"
    with pytest.raises(EngineError, match="SIGKILL"):
        await ask(client, request("late"))
    client.abort("late")
    assert [record.getMessage() for record in caplog.records if "SIGKILL" in record.getMessage()]


def test_a_killed_engine_is_noticed_on_uvloop(scratch: Path) -> None:
    async def session() -> None:
        client = await start("process", Scenario(step_seconds=0.005))
        tasks = await consumers(client, 8)
        os.kill(client.info.pid, signal.SIGKILL)
        await expect_errors(tasks, "killed by SIGKILL")
        await client.close()

    uvloop.run(session())
    assert not list(scratch.iterdir())


@pytest.mark.parametrize("number", sorted(GROUP_SIGNALS))
async def test_a_signal_to_the_group_is_not_for_the_engine(client: StreamingClient, number: signal.Signals) -> None:
    tasks = await consumers(client, 8)
    os.kill(client.info.pid, number)
    steps = client.stats().steps
    await until(lambda: client.stats().steps > steps + 2, "more steps")
    client.abort("r0")
    await tasks[0]
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert client.state.status != "ended"


async def test_an_engine_that_does_not_end_when_told_is_killed(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.link.ipc.CLOSE_SECONDS", 0.2)
    client = await start("process", Scenario(stuck_at=1))
    task = asyncio.create_task(ask(client, request("a")))
    await asyncio.sleep(0.1)
    await client.close()
    await expect_errors([task], "closed")
    assert not alive(client.info.pid)
    assert not list(scratch.iterdir())


async def test_a_stopped_engine_is_given_up_and_killed(scratch: Path) -> None:
    client = await start("process", Scenario(step_seconds=0.005), step_deadline=1.0)
    tasks = await consumers(client, 10)
    os.kill(client.info.pid, signal.SIGSTOP)
    await expect_errors(tasks, r"no step for 1 s and was given up \(--step-deadline\)")
    assert client.state.status == "ended"
    await until(lambda: not alive(client.info.pid), "the engine to end", AT_ONCE)
    await client.close()
    assert not list(scratch.iterdir())


# -- the engine does not get ready ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((*ENGINE,), "ended with status 3"),
        (("/nonexistent/python",), "could not be started"),
        ((sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"), "killed by SIGSEGV"),
        ((sys.executable, "-c", "raise SystemExit(0)"), "ended with status 0"),
    ],
    ids=["vanishes", "missing", "crashes", "leaves"],
)
async def test_an_engine_that_ends_while_starting_is_told(
    scratch: Path, command: tuple[str, ...], message: str
) -> None:
    before = descriptors()
    with pytest.raises(EngineError, match=message):
        await spawn(config(Scenario(exit=3)), command)
    assert descriptors() == before
    assert not list(scratch.iterdir())


async def test_an_engine_that_hangs_while_starting_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "IDLE_SECONDS", 0.6)
    monkeypatch.setattr(ipc, "LOOK_SECONDS", 0.2)
    before = children(os.getpid())
    busy = "import time\nuntil = time.monotonic() + 2\nwhile time.monotonic() < until: pass\ntime.sleep(60)"
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"used no processor time for .* while it started"):
        await spawn(config(), (sys.executable, "-c", busy))
    assert 2 < time.monotonic() - began < 30
    assert children(os.getpid()) == before


async def test_a_cancelled_start_leaves_nothing() -> None:
    files, before = descriptors(), children(os.getpid())
    starting = asyncio.create_task(spawn(config(), (sys.executable, "-c", "import time; time.sleep(60)")))
    await asyncio.sleep(0)
    assert len(children(os.getpid())) == len(before) + 1
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children(os.getpid()) == before
    assert descriptors() == files


async def test_what_an_engine_cannot_mean_ends_it() -> None:
    code = """
import socket, sys, time
socket.socket(fileno=int(sys.argv[1])).sendall(bytes((4, 0, 0, 0)) + b"what")
time.sleep(60)
"""
    with pytest.raises(EngineError, match="cannot be read"):
        await spawn(config(), (sys.executable, "-c", code))


# -- the client dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", MOMENTS)
async def test_an_engine_without_client_ends_at_once(scratch: Path, moment: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.engine.deserted", moment], stdout=subprocess.PIPE, env={**os.environ}
    )
    try:
        engine = int(await asyncio.to_thread(parent.stdout.readline))
        assert alive(engine)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    await until(lambda: not alive(engine), "the engine to end", AT_ONCE)
    assert not list(scratch.iterdir())


async def test_the_end_of_input_is_enough_where_there_is_no_prctl() -> None:
    code = """
import ctypes, time
from penstock.engine.child import die_at_end_of_input, die_with_parent
def missing(name): raise OSError("no libc here")
ctypes.CDLL = missing
die_with_parent()
die_at_end_of_input()
print("watching", flush=True)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert await asyncio.to_thread(process.stdout.readline) == b"watching\n"
        assert process.poll() is None
        process.stdin.close()
        await until(lambda: process.poll() is not None, "the process to end", AT_ONCE)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
