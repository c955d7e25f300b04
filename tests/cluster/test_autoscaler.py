"""The autoscaler with simulated engines, which a provider in this process starts."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import pytest

from penstock.cluster import autoscaler, load
from penstock.cluster.autoscaler import Autoscaler
from penstock.cluster.client import FleetClient
from penstock.cluster.load import LoadMeter
from penstock.cluster.place import PlacedEngine, PlacementError
from penstock.cluster.scale import ScalePolicy
from penstock.engine.inprocess import start_thread
from tests.engine.simulated import BACKEND, Scenario, ask, config, expected
from tests.patience import until
from tests.schedule.simulated import request

STEP = 0.005
SLOW = Scenario(step_seconds=STEP)
ELASTIC = ScalePolicy(least=0, most=3, window=0.6, idle=0.6, forecast=False)


class Threads:
    """A Placement: engines on threads, each ready some time after its order."""

    def __init__(self, fleet: FleetClient) -> None:
        self.fleet = fleet
        self.names: list[str] = []
        self.starts = 0
        self.fails = ""
        self.tasks: set[asyncio.Task[None]] = set()

    async def engines(self) -> Sequence[PlacedEngine]:
        if self.fails:
            raise PlacementError(self.fails)
        replicas = {replica.name: replica for replica in self.fleet.replicas}
        found = []
        for name in list(self.names):
            replica = replicas.get(name)
            if replica is None:
                found.append(PlacedEngine(name=name, status="starting"))
            elif replica.status == "draining" and not replica.parts:
                self.names.remove(name)
                self.fleet.leave(name)
                await replica.engine.close()
            else:
                status = "draining" if replica.status == "draining" else "ready"
                found.append(PlacedEngine(name=name, status=status, requests=replica.open_requests))
        return found

    async def ensure(self, count: int) -> None:
        draining = sum(replica.status == "draining" for replica in self.fleet.replicas)
        for _ in range(count - len(self.names) + draining):
            self.starts += 1
            self.names.append(f"t{self.starts}")
            self.tasks.add(asyncio.create_task(self._start(self.names[-1])))

    async def _start(self, name: str) -> None:
        await asyncio.sleep(0.1)
        self.fleet.join(name, await start_thread(config(SLOW, max_num_seqs=4), BACKEND))

    async def drain(self, name: str) -> None:
        self.fleet.drain(name, 60.0)

    async def kill(self, name: str) -> None:
        raise AssertionError("nothing is late here")

    async def changed(self) -> None:
        await asyncio.Event().wait()


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FleetClient]:
    monkeypatch.setattr(autoscaler, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(load, "RATE_SECONDS", 0.5)
    client = FleetClient(clock=time.monotonic, seed=1)
    yield client
    await client.close()


async def test_to_zero_and_back(fleet: FleetClient) -> None:
    engines = Threads(fleet)
    scaler = Autoscaler(fleet, engines, ELASTIC)
    fleet.keep(scaler.run())
    await until(lambda: fleet.state.status == "asleep", "a fleet without engines")
    reasons: list[str] = []
    for number in range(10):  # two are enough, unless a busy machine measures no load of the first one
        asked = request(f"r{number}", 5, 10)
        assert (await ask(fleet, asked)).choices[0] == expected(asked), "the front has held it"
        assert fleet.state.status == "ready" and engines.starts > number
        await until(lambda: not fleet.replicas and fleet.state.status == "asleep", "its end")
        reasons = [decision.reason for decision in scaler.decisions]
        if number and any("a request waits" in reason for reason in reasons):
            break
    assert any("a request waits" in reason for reason in reasons) and scaler.wanted == 0


async def test_load_brings_engines_and_its_end_takes_them(fleet: FleetClient) -> None:
    engines = Threads(fleet)
    scaler = Autoscaler(fleet, engines, ELASTIC)
    fleet.keep(scaler.run())
    asked = [request(f"r{number}", 5, 50) for number in range(24)]
    answers = asyncio.gather(*(ask(fleet, one) for one in asked))
    await until(lambda: sum(one.status == "ready" for one in fleet.replicas) == 3, "three engines")
    assert [answer.choices[0] for answer in await answers] == [expected(one) for one in asked]
    long = request("long", 5, 300)
    last = asyncio.create_task(ask(fleet, long))
    await until(lambda: sum(one.status == "ready" for one in fleet.replicas) == 1, "fewer engines")
    assert (await last).choices[0] == expected(long), "it ends where it was, or goes on elsewhere"
    await until(lambda: not fleet.replicas, "no engine")


async def test_a_provider_that_fails_changes_nothing_and_is_logged_once(
    fleet: FleetClient, caplog: pytest.LogCaptureFixture
) -> None:
    engines = Threads(fleet)
    scaler = Autoscaler(fleet, engines, ScalePolicy(least=2, most=3))
    engines.fails = "the API server does not answer"
    for _ in range(3):
        await scaler.step()
    assert engines.starts == 0 and caplog.text.count("the API server does not answer") == 1
    engines.fails = ""
    await scaler.step()
    await scaler.step()
    assert engines.starts == 2
    await asyncio.gather(*engines.tasks)


async def test_engines_that_were_there_before_stay_while_nothing_is_known(fleet: FleetClient) -> None:
    """An autoscaler that is started again does not begin from the least."""
    engines = Threads(fleet)
    await engines.ensure(3)
    await asyncio.gather(*engines.tasks)
    scaler = Autoscaler(fleet, engines, ScalePolicy(least=1, most=3))
    await scaler.step()
    assert scaler.wanted == 3 and "not known" in scaler.decisions[0].reason
    assert all(replica.status == "ready" for replica in fleet.replicas)


async def test_the_load_is_what_requests_bring(fleet: FleetClient) -> None:
    engines, meter = Threads(fleet), LoadMeter()
    assert meter.measure([], 0.0).load is None, "one look is no rate"
    assert meter.measure([], 1.0).load == 0.0, "zero is a measurement"
    await engines.ensure(1)
    await asyncio.gather(*engines.tasks)
    began = time.monotonic()
    meter.measure(fleet.replicas, began)
    await asyncio.gather(*(ask(fleet, request(f"r{number}", 20, 50)) for number in range(4)))
    found = meter.measure(fleet.replicas, began + 1.0)
    assert found.load is not None and 0.6 * 4 * 70 <= found.load <= 1.2 * 4 * 70
    assert found.capacity is not None and 0.2 * 4 / STEP < found.capacity < 1.5 * 4 / STEP, "four rows in a step"
    assert found.wait == 0.0
    (replica,) = fleet.replicas
    replica.engine._streams.end("the machine is gone")  # type: ignore[attr-defined]
    assert meter.measure(fleet.replicas, began + 2.0).load is None, "missing data is not zero"
