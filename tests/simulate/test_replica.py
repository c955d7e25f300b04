"""The loop of a simulated replica beside that of the engine: the same requests at the same times, the same plans."""

import random
from collections import deque
from collections.abc import Sequence

import pytest

from penstock.engine.core import EngineCore
from penstock.engine.link.wire import Abort, Add, Command
from penstock.engine.queue import RequestQueue
from penstock.messages import Capacity, KVGroup, StepResult
from penstock.schedule import Event, Scheduler, SchedulerConfig
from penstock.schedule.log import Submitted
from penstock.simulate.clock import NANO, EventClock
from penstock.simulate.costs.counter import StepCounter
from penstock.simulate.costs.fitted import fit, measured_steps
from penstock.simulate.costs.work import StepLoad
from penstock.simulate.replica import Machine, SimulatedReplica
from penstock.simulate.simulation import FOREVER
from penstock.simulate.traffic.request import SimulatedRequest, TokenIds, TokenRun
from tests.plan_checks import SimulatedExecutor

LIMITS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64, max_model_len=256)
REQUESTS = 120

Arrival = tuple[int, SimulatedRequest, bool]  # nanoseconds; True: the request is aborted then


class LinearCost:
    """Steps of whole microseconds."""

    stages = 1

    def seconds(self, work: StepLoad) -> float:
        return round(0.004 + 0.0005 * work.tokens + 1e-6 * work.decode_context, 6)


class BlockingExecutor(SimulatedExecutor):
    """Its `result` blocks, as that of a device does: the clock goes on until the step's end."""

    clock: EventClock

    @property
    def result_at(self) -> float:
        return 0.0

    def result(self) -> StepResult:
        end, result = self.outstanding.popleft()
        self._slots.taken()
        self.clock.set(max(round(end * 1e6) * 1000, self.clock.ns))
        return result


def arrivals(seed: int) -> list[Arrival]:
    chance, ids, at, found = random.Random(seed), TokenIds(), 0, list[Arrival]()
    shared = [ids.run(48) for _ in range(3)]
    for number in range(1, REQUESTS + 1):
        at += round(chance.expovariate(60.0) * NANO / 1000) * 1000
        prompt = (*chance.choice(shared), TokenRun(ids.take(), chance.randrange(1, 60)))
        deadline = chance.choice([0.0, 0.0, 0.0, 0.4])
        asked = SimulatedRequest(
            number, at, prompt, chance.randrange(1, 40), ids.take(), "a", first_token_timeout=deadline
        )
        found.append((at, asked, False))
        if chance.random() < 0.1:
            found.append((at + round(chance.random() * NANO / 1e5) * 10**5, asked, True))
    return sorted(found, key=lambda each: each[0])


def replica_plans(commands: Sequence[Arrival], capacity: Capacity) -> list[str]:
    clock, events = EventClock(), list[Event]()
    queue = RequestQueue(max_num_seqs=6, max_waiting=1000, max_waiting_tokens=10**6, clock=clock)
    scheduler = Scheduler(LIMITS, capacity, log=events)
    one = SimulatedReplica("r", "r", "m", "", scheduler, capacity, LinearCost(), Machine(), queue, clock)
    due: int | None = None
    for at, asked, aborted in [*commands, (FOREVER, None, False)]:
        while due is not None and due < at:
            clock.set(due)
            due = one.step()
        if asked is None:
            break
        clock.set(at)
        if aborted:
            one.abort(asked)
        else:
            one.book(asked, asked.prompt_tokens)
            one.receive(asked.message())
        if not one.computes:
            due = one.step()
    assert not one.waiting and not scheduler.has_work
    return [event.digest for event in events if isinstance(event, Submitted)]


def engine_plans(commands: Sequence[Arrival], capacity: Capacity) -> list[str]:
    """As `EngineCore.run`: commands are read after each step."""
    clock, events, counter, coming = EventClock(), list[Event](), StepCounter(), deque(commands)
    executor = BlockingExecutor(
        capacity,
        LIMITS,
        clock,
        seconds=lambda plan: LinearCost().seconds(counter.count(plan)),
        next_token=lambda each: each.sampling.seed or 0,
    )
    executor.clock = clock
    scheduler = Scheduler(LIMITS, capacity, log=events)
    core = EngineCore(scheduler, executor, lambda step: None, capacity, incarnation=0, clock=clock)
    wake: float | None = None
    while coming or wake is not None:
        if wake is None:
            clock.set(max(coming[0][0], clock.ns))
        commands_now: list[Command] = []
        while coming and coming[0][0] <= clock.ns:
            _, asked, aborted = coming.popleft()
            message = asked.message()
            commands_now.append(Abort(message.request_id) if aborted else Add(message))
        wake = core.step(commands_now)
    return [event.digest for event in events if isinstance(event, Submitted)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [40, 400])
def test_it_plans_as_the_engine_does(depth: int, blocks: int) -> None:
    """With few blocks, sequences are preempted."""
    capacity = Capacity(8, (KVGroup(blocks),), depth, vocab_size=2**31)
    commands = arrivals(10 * depth + blocks)
    plans = replica_plans(commands, capacity)
    assert len(plans) > REQUESTS
    assert plans == engine_plans(commands, capacity)


DELAY = 0.001_234_567


def beside_each_other() -> list[list[Event]]:
    """Two replicas on the same processors, each with requests of its own. Returns their logs."""
    clock, capacity, beside = EventClock(), Capacity(8, (KVGroup(400),), 1, vocab_size=2**31), {}
    logs: list[list[Event]] = [[], []]
    coming: list[tuple[int, int, SimulatedRequest | None]] = []  # when, for which replica; None: it is to step
    ones = []
    for place, log in enumerate(logs):
        queue = RequestQueue(max_num_seqs=6, max_waiting=1000, max_waiting_tokens=10**6, clock=clock)
        scheduler, cost = Scheduler(LIMITS, capacity, log=log), LinearCost()
        name = f"r{place}"
        ones.append(
            SimulatedReplica(
                name, "r", "m", "", scheduler, capacity, cost, Machine(), queue, clock, beside=beside, delay=DELAY
            )
        )
        coming += [(at + 137 * place, place, asked) for at, asked, aborted in arrivals(place) if not aborted]
    coming.sort(key=lambda each: each[:2])
    due: list[int | None] = [None, None]
    while coming or any(due):
        at, place = min([(each[0], each[1]) for each in coming[:1]] + [(d, i) for i, d in enumerate(due) if d])
        clock.set(at)
        one = ones[place]
        if coming and coming[0][:2] == (at, place):
            asked = coming.pop(0)[2]
            assert asked is not None
            one.book(asked, asked.prompt_tokens)
            one.receive(asked.message())
            if one.computes:
                continue
        due[place] = one.step()
    return logs


def test_each_result_of_a_neighbour_delays_a_step_and_a_fit_finds_by_how_much() -> None:
    """The results are counted in the logs, after the run."""
    logs = beside_each_other()
    steps = measured_steps(*logs)
    assert max(step.others for step in steps) > 2
    for step in steps:
        assert step.seconds == pytest.approx(LinearCost().seconds(step.work) + DELAY * step.others, abs=1e-8)
    found = fit(steps)
    assert found.delay == pytest.approx(DELAY, rel=0.01)
    assert found.seconds(StepLoad(4, 400, 0, 0, 0, 4)) == pytest.approx(0.0064, rel=0.01)
    assert fit(measured_steps(logs[0])).delay == 0.0, "alone, nothing is known of others"
