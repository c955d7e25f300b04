"""Streams over real engines on loopback while one of these is killed, stopped, drained or cut off: every stream has the
tokens that it has without a fault, whatever it asks for."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from penstock.cluster.client import FleetClient
from penstock.cluster.members import Members, find_addresses
from penstock.cluster.route import Route, choose
from penstock.engine.remote.connector import connect_engine
from penstock.messages import Drain
from tests.e2e.fleet.engines import KEY, EngineHostProcess, engines
from tests.e2e.fleet.requests import TOKENS, made, said
from tests.e2e.fleet.trials import KINDS, run
from tests.engine.simulated import Answer, ask
from tests.patience import AT_ONCE, until


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineHostProcess]]:
    with engines(tmp_path_factory.mktemp("fleet"), 2, "--max-num-seqs", "32") as running:
        yield running


@contextlib.asynccontextmanager
async def front(addresses: str, route: Route = choose) -> AsyncIterator[FleetClient]:
    """A fleet's client of the engines at these addresses."""
    fleet = FleetClient(route, clock=time.monotonic)
    members = Members(fleet, find_addresses(addresses), lambda address: connect_engine(address, KEY))
    keeping = asyncio.create_task(members.run())
    try:
        yield fleet
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await fleet.close()


async def joined(fleet: FleetClient, count: int) -> None:
    await until(lambda: sum(one.status == "ready" for one in fleet.replicas) == count, f"{count} engines")


async def undisturbed(fleet: FleetClient, count: int, tokens: int = TOKENS) -> list[tuple[object, ...]]:
    return [said(answer) for answer in await asyncio.gather(*(ask(fleet, made(i, tokens)) for i in range(count)))]


async def disturbed(
    fleet: FleetClient, count: int, moment: float, fault, tokens: int = TOKENS
) -> tuple[list[tuple[object, ...]], float]:
    """What the streams say when `fault()` is called at a moment, as a share of their tokens; and the longest time in
    which a stream got nothing."""
    answers = [Answer(made(number, tokens)) for number in range(count)]
    gap, reached = 0.0, asyncio.Event()
    wanted = moment * tokens * count

    async def read(answer: Answer) -> None:
        nonlocal gap
        last = time.monotonic()
        async for delta in fleet.generate(made(answers.index(answer), tokens)):
            now = time.monotonic()
            gap, last = max(gap, now - last), now
            answer.take(delta)
            if sum(len(ids) for one in answers for ids in one.choices.values()) >= wanted:
                reached.set()

    reading = [asyncio.create_task(read(answer)) for answer in answers]
    await asyncio.wait([asyncio.create_task(reached.wait()), *reading], return_when=asyncio.FIRST_COMPLETED)
    await fault()
    await asyncio.gather(*reading)
    return [said(answer) for answer in answers], gap


async def test_engines_that_end_or_stop_cost_no_token(hosts: list[EngineHostProcess]) -> None:
    """The process that computes: it is killed, or it stops in the middle of a step and accepts requests."""
    async with front(",".join(host.address for host in hosts)) as fleet:
        await joined(fleet, 2)
        # Long enough that the engine still computes when the fault comes, however late this process reads.
        expected = await undisturbed(fleet, 20, 300)
        for number, (fault, moment) in enumerate(((signal.SIGKILL, 0.2), (signal.SIGSTOP, 0.6), (signal.SIGKILL, 0.5))):
            host = hosts[number % 2]

            async def harm(host: EngineHostProcess = host, fault: signal.Signals = fault) -> None:
                os.kill(host.engine_pid, fault)

            got, gap = await disturbed(fleet, 20, moment, harm, 300)
            assert got == expected
            assert gap < AT_ONCE
            if fault is signal.SIGSTOP:
                os.kill(host.engine_pid, signal.SIGCONT)
            await joined(fleet, 2)
        assert fleet.moves["ended"] > 0 and fleet.moves["hung"] > 0


async def test_hosts_that_stop_are_left_and_come_back(hosts: list[EngineHostProcess]) -> None:
    """The process that fronts connect to: no byte comes from it, and nothing says that it has stopped."""
    async with front(",".join(host.address for host in hosts)) as fleet:
        await joined(fleet, 2)
        expected = await undisturbed(fleet, 10, 300)  # long enough that the engine still computes when it is stopped

        stopped: list[EngineHostProcess] = []

        async def stop() -> None:
            most = max(fleet.replicas, key=lambda replica: replica.open_requests).name
            stopped.extend(host for host in hosts if host.address == most)
            stopped[0].kill(signal.SIGSTOP)

        got, gap = await disturbed(fleet, 10, 0.3, stop, 300)
        assert got == expected
        assert 2.0 < gap < AT_ONCE
        others = [host.address for host in hosts if host is not stopped[0]]
        assert [one.name for one in fleet.replicas if one.status == "ready"] == others
        stopped[0].kill(signal.SIGCONT)
        await joined(fleet, 2)
        assert await undisturbed(fleet, 10, 300) == expected


async def test_two_fronts_share_engines_and_one_of_them_is_killed(hosts: list[EngineHostProcess]) -> None:
    addresses = ",".join(host.address for host in hosts)
    async with front(addresses) as fleet:
        await joined(fleet, 2)
        expected = await undisturbed(fleet, 8)
        async with front(addresses) as other:
            await joined(other, 2)
            both = await asyncio.gather(undisturbed(fleet, 8), undisturbed(other, 8))
            assert both[0] == both[1] == expected
            leaving = [asyncio.create_task(ask(other, made(number, 400))) for number in range(4)]
            await until(lambda: any(part.answered for one in other.replicas for part in one.parts), "them to run")
            for replica in other.replicas:
                replica.engine._link._leave()  # its connections close, and nothing is said
            await asyncio.sleep(0)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        await until(lambda: not any(one.engine.stats().running for one in fleet.replicas), "its requests to end")
        assert await undisturbed(fleet, 8) == expected


async def test_a_lost_host_and_a_drained_one(tmp_path: Path) -> None:
    """SIGKILL, then a drain whose grace is shorter than the streams, then SIGTERM as before the end of a machine. The
    last engine that is left has all streams."""
    with engines(tmp_path, 3, "--max-num-seqs", "32", "--drain-timeout", "0.2") as hosts:
        named = tmp_path / "engines"
        named.write_text("".join(f"{host.address}  # engine\n" for host in hosts))
        async with front(f"file:{named}") as fleet:
            await joined(fleet, 3)
            expected = await undisturbed(fleet, 8, 400)

            order = list(hosts)

            async def kill_drain_and_terminate() -> None:
                busiest = max(fleet.replicas, key=lambda one: len(one.parts))
                order.sort(key=lambda host: host.address != busiest.name)
                order[0].kill()
                await asyncio.sleep(0.2)
                replica = next(one for one in fleet.replicas if one.name == order[1].address)
                await replica.engine.control(Drain(0.2))

            got, gap = await disturbed(fleet, 8, 0.05, kill_drain_and_terminate, 400)
            assert got == expected
            assert fleet.moves["ended"] and gap < AT_ONCE, "a closed connection is seen at once"
            await until(lambda: order[1].process.poll() == 0, "the drained engine to end")
            order[2].kill(signal.SIGTERM)
            await until(lambda: order[2].process.poll() == 0, "the engine to end")
            await until(lambda: not any(one.status == "ready" for one in fleet.replicas), "all to be gone")
            named.write_text("")
            late = asyncio.create_task(ask(fleet, made(0, 5)))
            await asyncio.sleep(0.2)
            assert not late.done() and fleet.held == 1, "it waits for an engine"
            late.cancel()


@pytest.mark.rare
async def test_faults_of_every_kind_at_random_moments_cost_no_token(tmp_path: Path) -> None:
    """Each kind once, under 50 streams. `python -m tests.e2e.fleet.trials` goes on with them."""
    trials = await run(tmp_path, len(KINDS), seed=11)
    assert len(trials) == len(KINDS)
    for trial in trials:
        assert trial.same, trial
        assert trial.detection is None or trial.detection < 3 * (KINDS[trial.kind] or 60.0), trial
