"""Three production engines on one thread and one virtual clock, with a queue of events between them."""

import asyncio
import hashlib
import heapq
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from penstock.engine.core import EngineCore
from penstock.engine.link.wire import Add, Command, Step
from penstock.messages import Capacity, GenerateRequest, KVGroup, StepPlan, TokenDelta
from penstock.schedule import Scheduler, SchedulerConfig
from tests.engine.simulated import Answer
from tests.plan_checks import VOCABULARY, SimulatedExecutor, VirtualClock, mix
from tests.schedule.invariants import check_scheduler
from tests.schedule.simulated import expected_output, request

ENGINES = 3
REQUESTS = 300
ARRIVALS = 150.0  # a second, in all
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)
READS: dict[str, Callable[[], object]] = {
    "time": lambda: time.time(),
    "monotonic": lambda: time.monotonic(),
    "perf_counter": lambda: time.perf_counter(),
    "sleep": lambda: time.sleep(0),
    "loop": lambda: asyncio.BaseEventLoop.time(None),  # type: ignore[arg-type]
}


class Sent(NamedTuple):
    """A delta, and when which engine sent it."""

    at: float
    engine: int
    delta: TokenDelta


class Outcome(NamedTuple):
    requests: list[GenerateRequest]
    sent: list[Sent]
    schedulers: list[Scheduler]

    @property
    def output(self) -> bytes:
        return msgspec.msgpack.encode(self.sent)


class WallClockRead(Exception):
    """A clock other than the simulation's was read."""


def step_seconds(plan: StepPlan) -> float:
    return 0.004 + 0.0005 * sum(work.count for work in plan.work)


def arrivals(seed: int, count: int) -> Iterator[tuple[float, int, GenerateRequest]]:
    """When which engine gets which request. Many prompts begin alike."""
    chance, now = random.Random(seed), 0.0
    for number in range(count):
        now += chance.expovariate(ARRIVALS)
        topic = chance.randrange(4)
        prompt = [mix(topic, i) % VOCABULARY for i in range(chance.randrange(24))] + [chance.randrange(VOCABULARY)]
        asked = request(f"r{number}", prompt, chance.randrange(1, 32), seed=chance.getrandbits(32))
        yield now, chance.randrange(ENGINES), asked


def simulate(
    schedule: list[tuple[float, int, GenerateRequest]], seconds: Callable[[StepPlan], float] = step_seconds
) -> Outcome:
    """Run until nothing happens any more. Engine i has depth i + 1."""
    clock, sent = VirtualClock(), list[Sent]()
    cores, schedulers = [], []

    def engine(number: int) -> None:
        def post(step: Step) -> None:
            assert not step.rejected
            sent.extend(Sent(clock(), number, delta) for delta in step.deltas)

        capacity = Capacity(4, (KVGroup(41),), number + 1, vocab_size=VOCABULARY)
        schedulers.append(Scheduler(LIMITS, capacity, incarnation=number))
        executor = SimulatedExecutor(capacity, LIMITS, clock, seconds=seconds)
        cores.append(EngineCore(schedulers[-1], executor, post, capacity, incarnation=number, clock=clock))

    for number in range(ENGINES):
        engine(number)
    order = itertools.count()
    events: list[tuple[float, int, int, list[Command]]] = []
    for at, number, asked in schedule:
        heapq.heappush(events, (at, next(order), number, [Add(asked)]))
    due: list[float | None] = [None] * ENGINES  # when each engine steps next; an event for another time is outdated
    while events:
        at, _, number, commands = heapq.heappop(events)
        if not commands and at != due[number]:
            continue
        clock.now = at
        wake = cores[number].step(commands)
        due[number] = wake
        if wake is not None:
            due[number] = wake = max(wake, at)
            heapq.heappush(events, (wake, next(order), number, []))
    return Outcome([asked for _, _, asked in schedule], sent, schedulers)


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While this lasts, every read of a clock of the machine raises WallClockRead."""

    def fail(*_: object) -> None:
        raise WallClockRead

    names = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    clocks = {id(getattr(time, name)) for each in names for name in (each, f"{each}_ns")} | {id(time.sleep)}
    with monkeypatch.context() as patch:
        for module in [time, *(module for name, module in sys.modules.items() if name.startswith("penstock"))]:
            for name in [name for name, value in vars(module).items() if id(value) in clocks]:
                patch.setattr(module, name, fail)
        patch.setattr(asyncio.BaseEventLoop, "time", fail)
        yield


@pytest.mark.usefixtures("virtual")
def test_all_requests_get_their_tokens() -> None:
    outcome = simulate(list(arrivals(1, REQUESTS)))
    answers = {asked.request_id: Answer(asked) for asked in outcome.requests}
    for sent in outcome.sent:
        answers[sent.delta.request_id].take(sent.delta)
        assert sent.delta.incarnation == sent.engine
    for asked in outcome.requests:
        tokens, reason = expected_output(asked, 0, LIMITS.max_model_len)
        answer = answers[asked.request_id]
        assert (answer.choices, answer.reasons) == ({0: tokens}, {0: reason})
    assert [sent.at for sent in outcome.sent] == sorted(sent.at for sent in outcome.sent)
    changes = sum(one.engine != other.engine for one, other in itertools.pairwise(outcome.sent))
    assert changes > REQUESTS, "the engines run at the same time"
    for scheduler in outcome.schedulers:
        assert not scheduler.has_work
        check_scheduler(scheduler)
        assert scheduler.stats().prefix_hits > 0 and scheduler.stats().preemptions > 0


@pytest.mark.usefixtures("virtual")
def test_equal_seeds_give_equal_bytes() -> None:
    first, again, other = (simulate(list(arrivals(seed, REQUESTS))).output for seed in (1, 1, 2))
    assert first == again
    assert first != other and len(first) > 10_000


def digest(seed: int) -> str:
    return hashlib.sha256(simulate(list(arrivals(seed, REQUESTS))).output).hexdigest()


def test_a_process_that_hashes_otherwise_gives_equal_bytes() -> None:
    """So no output depends on the order of a set."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", f"from {__name__} import digest; print(digest(1))"]
    found = [
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=root, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    assert {process.stdout.decode().strip() for process in found} == {digest(1)}


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("engine", range(ENGINES))
def test_a_request_alone_takes_the_time_of_its_steps(engine: int) -> None:
    """With any depth: a plan begins when the one before it ends."""
    sent = simulate([(2.0, engine, request("a", 10, 5))], lambda plan: 0.25).sent
    assert [each.at for each in sent] == [2.25, 2.5, 2.75, 3.0, 3.25]
    assert sent[-1].delta.timing is not None and sent[-1].delta.timing.decode == 1.0


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("engine", range(ENGINES))
def test_a_request_that_comes_during_a_step_is_in_the_next_plan(engine: int) -> None:
    sent = simulate([(2.0, engine, request("a", 10, 8)), (2.1, engine, request("b", 10, 1))], lambda plan: 0.25).sent
    assert [each.at for each in sent if each.delta.request_id == "b"] == [2.5 + 0.25 * engine]


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("read", READS)
def test_reading_another_clock_is_noticed(read: str) -> None:
    def seconds(plan: StepPlan) -> float:
        READS[read]()
        return 0.25

    with pytest.raises(WallClockRead):
        simulate([(0.0, 0, request("a"))], seconds)
