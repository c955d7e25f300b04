"""The turns of engines on shared processors. Each engine of the unit tests is a thread: the library releases Python's
lock while it waits. The engines that die are processes."""

import asyncio
import contextlib
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.config.engine import LEASE_BYTES, LeasePlace
from penstock.engine.launch import launch
from penstock.engine.link.ipc import spawn
from penstock.kernels.native.loader import LIBRARY, instruction_sets
from penstock.messages import GenerateRequest, SamplingParams
from penstock.runtime.step_lease import SharedProcessors
from penstock.weights.packaged import embedded_model
from tests.patience import until
from tests.smollm2 import smollm2

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="there are no native kernels for this machine")
HOLDER = Path(__file__).with_name("lease_holder.py")
STEP, KILLS, LONG = 0.002, 20, 30.0
LEAST_HANG = 0.1  # seconds of a step, from which on others may pass over it


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "lease"
    path.write_bytes(bytes(LEASE_BYTES))
    return path


def lease(segment: Path, place: int, weight: float = 1.0) -> SharedProcessors:
    return SharedProcessors(LeasePlace(path=str(segment), place=place, weight=weight))


class Competing:
    """An engine that always has work, on a thread."""

    def __init__(self, segment: Path, place: int, weight: float, work: Callable[[int], None]) -> None:
        self.seconds, self.steps, self.waited = 0.0, 0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(lease(segment, place, weight), place, work))
        self._thread.start()

    def _run(self, own: SharedProcessors, place: int, work: Callable[[int], None]) -> None:
        while not self._stop.is_set():
            own.take(math.inf)
            began = time.monotonic()
            work(place)
            self.seconds += time.monotonic() - began
            self.steps += 1
        own.give()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LONG)


def compete(segment: Path) -> list[float]:
    """The shares of three engines, of which the second has three times the weight, and steps that last longer."""
    segment.write_bytes(bytes(LEASE_BYTES))
    steps: list[tuple[float, float]] = []

    def work(place: int) -> None:
        began = time.monotonic()
        time.sleep(STEP * (1 + place))
        steps.append((began, time.monotonic()))

    engines = [Competing(segment, place, weight, work) for place, weight in ((0, 1.0), (1, 3.0), (2, 1.0))]
    deadline = time.monotonic() + LONG
    while sum(engine.seconds for engine in engines) < 1.0 and time.monotonic() < deadline:
        time.sleep(0.05)
    taken = [engine.seconds for engine in engines]
    for engine in engines:
        engine.stop()
    steps.sort()
    for (began, ended), (other, _) in pairwise(steps):
        assert other >= ended or ended - began >= LEAST_HANG, "two engines had the lease at a time"
    return [seconds / sum(taken) for seconds in taken]


def test_turns_follow_the_weights_and_never_overlap(segment: Path) -> None:
    tries = []
    for _ in range(5):  # a busy machine may stop a thread for a good part of a try
        tries.append(compete(segment))
        if tries[-1] == pytest.approx([0.2, 0.6, 0.2], abs=0.03):
            return
    raise AssertionError(tries)


def test_an_engine_alone_keeps_its_turn_and_idle_time_gives_no_credit(segment: Path) -> None:
    alone, other = lease(segment, 0), lease(segment, 1)
    for _ in range(3):
        assert not alone.take(math.inf)
        time.sleep(0.02)
    alone.give()
    assert other.take(math.inf), "the other one had a step within the last second"
    other.give()
    turns = []

    def run(own: SharedProcessors, name: str) -> None:
        for _ in range(10):
            own.take(math.inf)
            turns.append(name)
            time.sleep(0.006)
        own.give()

    threads = [threading.Thread(target=run, args=each) for each in ((alone, "alone"), (other, "other"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert 3 <= turns[:10].count("other") <= 7, turns


def test_a_request_near_its_deadline_goes_ahead(segment: Path) -> None:
    holder, waiting, urgent = (lease(segment, place) for place in range(3))
    order: list[str] = []
    holder.take(math.inf)
    time.sleep(0.1)
    holder.take(math.inf)  # its usual step is long from now on, so that nobody passes it over below

    def wait(own: SharedProcessors, due: float, name: str) -> None:
        own.take(due)
        order.append(name)
        own.give()

    first = threading.Thread(target=wait, args=(waiting, math.inf, "waiting"))
    second = threading.Thread(target=wait, args=(urgent, time.monotonic() + 0.1, "urgent"))
    for place, thread in ((1, first), (2, second)):
        thread.start()
        while not waits(segment, place):
            time.sleep(0.001)
    holder.give()
    for thread in (first, second):
        thread.join(LONG)
    assert order == ["urgent", "waiting"]


def waits(segment: Path, place: int) -> bool:
    """Whether the engine waits for its turn, or has got it already. See native/cpp/lease.h."""
    data = segment.read_bytes()
    own = data[64 * (place + 1) :]
    return int.from_bytes(own[4:8], "little") == 1 or data[0] == place + 1


def test_a_holder_that_hangs_is_passed_over(segment: Path) -> None:
    hanging, other = lease(segment, 0), lease(segment, 1)
    hanging.take(math.inf)
    began = time.monotonic()
    other.take(math.inf)  # returns, although the holder gave nothing back
    assert time.monotonic() - began >= 0.09
    spent: list[float] = []

    def wait() -> None:
        began = time.thread_time()
        hanging.take(math.inf)
        spent.append(time.thread_time() - began)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    other.give()
    thread.join(LONG)
    assert spent and spent[0] < 0.03, "who waits does not spin"
    hanging.give()


def test_killed_holders_free_it(segment: Path) -> None:
    own = lease(segment, 0)
    for number in range(KILLS):
        command = [sys.executable, "-I", "-S", str(HOLDER), str(LIBRARY), str(segment), "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == b"taken\n", number
            holder.kill()  # not reaped yet while the other engine takes its turn
            own.take(math.inf)
            own.give()


async def tokens(model: Path, places: list[LeasePlace | None]) -> list[list[int]]:
    """The tokens of an engine for each place, which work at the same time."""

    async def run(place: LeasePlace | None) -> list[int]:
        config = EngineConfig(
            model=str(model), name="m", max_model_len=256, max_num_seqs=2, kv_cache_bytes=32 << 20, lease=place
        )
        client = await launch(config, in_process=True)
        try:
            request = GenerateRequest(
                request_id="r",
                prompt_ids=tuple(range(100, 180)),
                sampling=SamplingParams(seed=1, max_tokens=24, temperature=0.0, ignore_eos=True),
            )
            return [token async for delta in client.generate(request) for token in delta.token_ids]
        finally:
            await client.close()

    return list(await asyncio.gather(*map(run, places)))


def test_engines_that_take_turns_give_the_tokens_of_one_alone(segment: Path) -> None:
    model = smollm2()
    (alone,) = asyncio.run(tokens(model, [None]))
    both = asyncio.run(tokens(model, [LeasePlace(path=str(segment), place=place) for place in (0, 1)]))
    assert both == [alone, alone] and len(alone) == 24
    assert int.from_bytes(segment.read_bytes()[:8], "little") >> 8 > 1, "no turn was taken"


async def priorities(config: EngineConfig) -> set[float]:
    """The nice values of an engine's threads, inf for SCHED_IDLE: those seen while it starts. When it is ready, all
    have this process's own soon: a thread that loaded at a low priority needs time that others take to end."""
    starting, seen = asyncio.create_task(spawn(config)), set[float]()
    while not starting.done():
        await asyncio.sleep(0.02)
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            seen |= thread_priorities(child)
    client = await starting
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        await until(lambda: thread_priorities(client.info.pid) == {own}, "the threads that loaded to end")
        return seen
    finally:
        await client.close()


def thread_priorities(process: int | str) -> set[float]:
    found = set()
    for thread in Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = thread.read_text().rpartition(")")[2].split()
            idle = int(fields[38]) == os.SCHED_IDLE
            found.add(math.inf if idle else int(fields[16]))
    return found


def test_an_engine_that_replaces_another_one_loads_at_the_lowest_priority(segment: Path) -> None:
    lease = LeasePlace(path=str(segment), place=0)
    config = EngineConfig(
        model=str(embedded_model()), name="m", max_model_len=256, kv_cache_bytes=32 << 20, lease=lease
    )
    waited_for = asyncio.run(priorities(config))
    assert 10 in waited_for  # 19 is seen, too: threads that read before it is needed
    candidate = asyncio.run(priorities(replace(config, replaces=True)))
    assert math.inf in candidate and 10 not in candidate
