"""The core loop against a script of commands, with an executor of depth 1 to 3 and a clock that stands still."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest

from penstock.engine.core import ADMISSION_SECONDS, COMPILER_SECONDS, HEALTH_SECONDS, EngineCore
from penstock.engine.link.wire import Abort, Add, Command, Control, ControlReply, Finish, Refused, Rejected, Step, Stop
from penstock.messages import (
    OUT_OF_MEMORY,
    Capacity,
    EngineError,
    GenerateRequest,
    Grammar,
    Identity,
    KVGroup,
    ResetCache,
    Sleep,
    StepPlan,
    StepResult,
    StepTiming,
    TokenDelta,
)
from penstock.schedule import Scheduler, SchedulerConfig
from tests.engine.simulated import BAD_SEED, Answer, expected
from tests.plan_checks import VOCABULARY, SimulatedExecutor, VirtualClock
from tests.schedule.invariants import check_scheduler
from tests.schedule.simulated import request

LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)


class ManualClock(VirtualClock):
    per_look = 0.0  # seconds that pass with every look at it

    def __call__(self) -> float:
        self.now += self.per_look
        return self.now


class ScriptedChannel:
    """Hands out one batch of commands per step and ends the engine when it runs dry and the engine is idle."""

    def __init__(self, *batches: list[Command | Refused]) -> None:
        self.batches = deque(batches)
        self.steps: list[Step] = []
        self.deltas: list[TokenDelta] = []
        self.begun: list[list[str]] = []
        self.waits = 0
        self.asleep: Callable[[], None] = lambda: None

    def receive(self, *, wait: float) -> list[Command | Refused]:
        if wait > 0.0:
            self.waits += 1
            self.asleep()
        if self.batches:
            return self.batches.popleft()
        return [Stop("the script is over")] if wait > 0.0 else []

    def post(self, step: Step) -> None:
        self.deltas += step.deltas
        if step.begun:  # it goes ahead of the step that it announces
            self.begun.append(step.begun)
        else:
            self.steps.append(step)

    def answer(self, asked: GenerateRequest) -> Answer:
        answer = Answer(asked)
        for delta in self.deltas:
            if delta.request_id == asked.request_id:
                answer.take(delta)
        return answer


class BlockingExecutor(SimulatedExecutor):
    """The simulated executor; `result` blocks while a step's time passes on a manual clock."""

    result_at = 0.0

    def __init__(self, capacity: Capacity, clock: ManualClock) -> None:
        super().__init__(capacity, LIMITS, clock, fails=lambda sampling, choice, length: sampling.seed == BAD_SEED)
        self.clock = clock
        self.deepest = self.looks = 0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        self.deepest = max(self.deepest, len(self.outstanding))

    def result(self) -> StepResult:
        self.clock.now += 0.010
        return msgspec.structs.replace(super().result(), timing=StepTiming(0.006, 0.003, 0.010))

    def health(self) -> None:
        self.looks += 1


class Bench:
    """A core and everything around it."""

    def __init__(self, *batches: list[Command | Refused], depth: int = 1) -> None:
        capacity = Capacity(4, (KVGroup(257),), depth, Identity("simulated"), VOCABULARY)
        self.clock = ManualClock(100.0)
        self.port = ScriptedChannel(*batches)
        self.scheduler = Scheduler(LIMITS, capacity, incarnation=3)
        self.executor = BlockingExecutor(capacity, self.clock)
        self.core = EngineCore(self.scheduler, self.executor, self.port.post, capacity, incarnation=3, clock=self.clock)

    def run(self) -> ScriptedChannel:
        assert self.core.run(self.port) == "the script is over"
        check_scheduler(self.scheduler)
        return self.port


def adds(*requests: GenerateRequest) -> list[Command | Refused]:
    return [Add(one) for one in requests]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_keeps_as_many_plans_outstanding_as_the_executor_takes(depth: int) -> None:
    asked = [request(f"r{i}", 5 + i, 20 + i, n=1 + i % 2) for i in range(6)]
    bench = Bench(adds(*asked), depth=depth)
    port = bench.run()
    for one in asked:
        assert port.answer(one).choices == {choice: expected(one, choice) for choice in range(one.n)}
    assert bench.executor.deepest == depth


@pytest.mark.parametrize("depth", [1, 2])
def test_says_everything_of_a_step_in_one_message(depth: int) -> None:
    asked = [request(f"r{i}", 5, 10) for i in range(4)]
    port = Bench(adds(*asked), depth=depth).run()
    assert port.steps[-1].stats is not None and port.steps[-1].stats.steps == len(port.steps)
    assert len(port.steps[3].deltas) == 4
    assert {delta.incarnation for delta in port.deltas} == {3}


def test_statistics_of_like_steps_are_sent_at_intervals() -> None:
    bench = Bench(adds(request("a", 4, 40)), adds(request("b", 4, 5)))
    port, sent = bench.run(), []
    ended = {i for i, step in enumerate(port.steps) if any(delta.finish_reason for delta in step.deltas)}
    for i, step in enumerate(port.steps):
        if step.stats is not None:
            sent.append(i)
            assert step.stats.steps == i + 1
    assert {0, 1} | ended <= set(sent), "as the number of running sequences changes"
    assert 2 < len(sent) < len(port.steps)


def test_requests_are_announced_before_their_first_step() -> None:
    bench = Bench(adds(request("a", 4, 10)), [], adds(request("b", 4, 5), request("c", 4, 5)))
    submit, announced = bench.executor.submit, []
    bench.executor.submit = lambda plan: (announced.append(list(bench.port.begun)), submit(plan))[1]  # type: ignore[attr-defined]
    bench.run()
    assert announced[0] == [["a"]]
    assert bench.port.begun == announced[-1] == [["a"], ["b", "c"]]


def test_sleeps_only_when_there_is_nothing_to_do() -> None:
    port = Bench(adds(request("a", 4, 10)), [], [], adds(request("b", 4, 5)), [], [], [], [], [], []).run()
    assert len(port.steps) == 10
    assert port.waits == 2  # at the start and at the end


def test_looks_after_the_executor_while_it_sleeps() -> None:
    bench = Bench([], [], adds(request("a", 4, 10)))
    port = bench.run()
    assert bench.executor.looks == port.waits == 4  # twice for nothing, at the start and at the end


class CountedLease:
    """Turns of an engine that is alone."""

    turns = 0

    def take(self, due: float) -> bool:
        self.turns += 1
        return False

    def give(self) -> None:
        pass


def test_an_engine_without_work_takes_no_turn() -> None:
    bench, lease = Bench([], [], adds(request("a", 4, 10)), [], [], *([[]] * 20)), CountedLease()
    bench.core = EngineCore(
        *(bench.scheduler, bench.executor, bench.port.post, bench.executor.capacity),
        incarnation=3,
        clock=bench.clock,
        lease=lease,
    )
    bench.run()
    # One for each of ten steps, one at the end of the work, and one for the command that ends the script.
    assert lease.turns == 12


def test_an_executor_that_ends_while_the_engine_sleeps_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench([], [])

    def fail() -> None:
        raise EngineError("rank 1 is gone")

    monkeypatch.setattr(bench.executor, "health", fail)
    with pytest.raises(EngineError, match="rank 1 is gone"):
        bench.core.run(bench.port)


def test_time_asleep_is_no_steps_time() -> None:
    bench = Bench(adds(request("a", 4, 5)), *([[]] * 4), adds(request("b", 4, 5)))

    def asleep() -> None:
        bench.clock.now += 1000

    bench.port.asleep = asleep
    stats = bench.run().steps[-1].stats
    assert stats.steps == 10
    assert stats.step_seconds == pytest.approx(0.100)
    assert stats.forward_seconds == pytest.approx(0.060)
    assert stats.sample_seconds == pytest.approx(0.030)


def test_stamps_the_arrival_on_its_own_clock() -> None:
    bench = Bench(adds(request("a", 4, 3), request("b", 4, 3, arrival=60.0)))
    port = bench.run()
    assert port.answer(request("a")).ends[0].timing.queued == 0.0
    assert port.answer(request("b")).ends[0].timing.queued == pytest.approx(40.0)


def test_a_flood_of_requests_does_not_stall_those_that_run() -> None:
    flood = [request(f"r{i}", 4, 3) for i in range(100)]
    bench = Bench(adds(request("first", 4, 60)), adds(*flood))
    bench.clock.per_look = ADMISSION_SECONDS / 4
    port = bench.run()
    waiting = [step.stats.running + step.stats.waiting for step in port.steps[:10] if step.stats]
    assert len(waiting) > 3
    assert max(b - a for a, b in pairwise(waiting)) <= 4
    for one in flood:
        assert port.answer(one).choices == {0: expected(one)}


def test_an_abort_overtakes_requests_not_yet_admitted() -> None:
    flood = [request(f"r{i}", 4, 3, n=2) for i in range(50)]
    bench = Bench([*adds(*flood), Abort("r49"), Abort("r0"), Abort("nobody")])
    bench.clock.per_look = ADMISSION_SECONDS
    port = bench.run()
    first = port.steps[0]
    assert first.aborted == ["r49", "r0", "nobody"]
    assert [(delta.request_id, delta.choice, delta.finish_reason) for delta in first.deltas[:4]] == [
        ("r49", 0, "abort"),
        ("r49", 1, "abort"),
        ("r0", 0, "abort"),
        ("r0", 1, "abort"),
    ]
    assert port.answer(flood[1]).reasons == {0: "length", 1: "length"}


def test_finish_reaches_a_request_not_yet_admitted() -> None:
    resumed = request("late", 4, 20, output_ids=(1, 2, 3))
    bench = Bench([*adds(request("first"), resumed), Finish("late", 0, "stop", 2), Finish("nobody", 0, "stop", 2)])
    bench.clock.per_look = ADMISSION_SECONDS
    assert bench.run().answer(resumed).choices == {0: [1, 2]}


def test_commands_are_answered_without_a_step() -> None:
    rejected = Rejected("unreadable", "invalid request: Expected `int`")
    unknown = ControlReply(9, error="unknown control message")
    port = Bench([Abort("nobody"), Control(7, ResetCache()), Control(8, Sleep()), unknown, rejected]).run()
    (step,) = port.steps
    assert step.stats.steps == 0
    assert step.aborted == ["nobody"]
    assert step.rejected == [rejected]
    assert [(reply.serial, bool(reply.error)) for reply in step.replies] == [(7, False), (8, True), (9, True)]


@pytest.mark.parametrize("at_once", [True, False])
def test_an_id_in_use_is_refused(at_once: bool) -> None:
    asked = request("a", 4, 5)
    port = Bench(*([adds(asked, asked)] if at_once else [adds(asked), adds(asked)])).run()
    (rejected,) = [rejected for step in port.steps for rejected in step.rejected]
    assert rejected.request_id == "a"
    assert port.answer(asked).choices == {0: expected(asked)}


def test_whatever_add_raises_is_that_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = request("good", 4, 5), request("bad", 4, 5, n=2, seed=13)
    bench = Bench(adds(bad, good))
    add = bench.scheduler.add

    def fragile(one: GenerateRequest, now: float) -> list[TokenDelta]:
        if one.sampling.seed == 13:
            raise KeyError("a bug")
        return add(one, now)

    monkeypatch.setattr(bench.scheduler, "add", fragile)
    port = bench.run()
    assert port.answer(bad).reasons == {0: "error", 1: "error"}
    assert "KeyError: 'a bug'" in port.answer(bad).ends[0].error
    assert port.answer(good).choices == {0: expected(good)}


def test_a_failing_row_is_that_requests_alone() -> None:
    good, bad = request("good", 4, 5), request("bad", 4, 5, seed=BAD_SEED)
    port = Bench(adds(bad, good)).run()
    assert port.answer(bad).reasons == {0: "error"}
    assert port.answer(good).choices == {0: expected(good)}


@pytest.mark.parametrize("part", ["submit", "result"])
def test_a_failing_executor_is_everybodys(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    bench = Bench(adds(request("a")))

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(bench.executor, part, fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        bench.core.run(bench.port)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("part", ["submit", "result"])
def test_a_failed_allocation_ends_the_request_that_needed_most(
    monkeypatch: pytest.MonkeyPatch, part: str, depth: int
) -> None:
    running = [request(f"running {i}", 6, 40, n=2, logprobs=0) for i in range(3)]
    long, waiting = request("long", 60, 5), request("waiting", 6, 5)
    bench = Bench(adds(*running), [], [], [], adds(long, waiting), depth=depth)
    submit, result = bench.executor.submit, bench.executor.result
    due = 0  # times

    def submit_or_fail(plan: StepPlan) -> None:
        nonlocal due
        due += sum(new.num_prompt == 60 for new in plan.new)
        submit(plan)
        fail_once("submit")

    def fail_once(here: str) -> None:
        nonlocal due
        if due == 1 and part == here:
            due = 2
            raise MemoryError("no memory")

    def result_or_fail() -> StepResult:
        fail_once("result")
        return result()

    monkeypatch.setattr(bench.executor, "submit", submit_or_fail)
    monkeypatch.setattr(bench.executor, "result", result_or_fail)
    port = bench.run()
    assert port.answer(long).reasons == {0: "error"}
    assert port.answer(long).ends[0].error.startswith(OUT_OF_MEMORY)
    for asked in (*running, waiting):
        answer = port.answer(asked)
        assert answer.choices == {choice: expected(asked, choice) for choice in range(asked.n)}
    assert not bench.scheduler.has_work
    check_scheduler(bench.scheduler)


def test_work_that_is_never_planned_is_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(adds(request("a")))
    monkeypatch.setattr(bench.scheduler, "plan", lambda now: None)
    with pytest.raises(RuntimeError, match="has work but plans none"):
        bench.core.run(bench.port)


def test_stop_ends_the_loop_between_two_steps() -> None:
    bench = Bench(adds(request("a", 4, 50)), [], [Stop("enough")])
    assert bench.core.run(bench.port) == "enough"
    assert len(bench.port.steps) == 2


def on_a_clock(bench: Bench, seconds: float) -> EngineCore:
    """A core whose executor does not block: a result is there `seconds` after the plan."""
    capacity = bench.executor.capacity
    executor = SimulatedExecutor(capacity, LIMITS, bench.clock, seconds=lambda plan: seconds)
    return EngineCore(bench.scheduler, executor, bench.port.post, capacity, incarnation=3, clock=bench.clock)


def test_a_step_returns_when_the_next_one_is_due() -> None:
    bench = Bench()
    core, clock = on_a_clock(bench, 0.25), bench.clock
    assert core.step() is None, "there is nothing to do"
    assert core.step(adds(request("a", 4, 2))) == 100.25
    clock.now = 100.1
    assert core.step(adds(request("b", 4, 1))) == 100.25, "a command does not shorten the step that runs"
    assert not bench.port.deltas
    clock.now = 100.25
    assert core.step() <= clock.now, "the next plan can begin at once"
    assert core.step() == 100.5
    clock.now = 101.0
    assert core.step() <= clock.now
    assert core.step() is None
    assert [delta.request_id for delta in bench.port.deltas] == ["a", "a", "b"]
    assert bench.port.steps[-1].stats.step_seconds == pytest.approx(1.0)
    assert core.step([Stop("enough")]) is None and core.stop_reason == "enough"


def test_a_grammar_that_is_being_compiled_is_looked_at_again_soon() -> None:
    bench = Bench()
    bench.executor.prepare = lambda grammar: False  # type: ignore[method-assign]
    held = msgspec.structs.replace(request("held"), grammar=Grammar("regex", "a"))
    assert bench.core.step(adds(held)) == bench.clock.now + COMPILER_SECONDS
    bench.clock.now += 1.0
    assert bench.core.step([Abort("held")]) is None


def test_the_loop_blocks_for_commands_until_a_result_is_due() -> None:
    bench, waits = Bench(), []

    class SleepingChannel(ScriptedChannel):
        def receive(self, *, wait: float) -> list[Command | Rejected]:
            waits.append(wait)
            if self.batches:
                return self.batches.popleft()
            bench.clock.now += wait
            return [Stop("the script is over")] if wait == HEALTH_SECONDS else []

    assert on_a_clock(bench, 0.25).run(SleepingChannel(adds(request("a", 4, 3)))) == "the script is over"
    assert waits == [HEALTH_SECONDS, 0.25, 0.0, 0.25, 0.0, 0.25, 0.0, HEALTH_SECONDS]
    assert len(bench.port.deltas) == 3


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    held, plain = (request(name, seed=i + 1) for i, name in enumerate(("held", "plain")))
    held = msgspec.structs.replace(held, grammar=Grammar("regex", "a"))
    bench = Bench(adds(held, plain), *([] for _ in range(40)))
    asked: list[Grammar] = []

    def prepare(grammar: Grammar) -> bool:
        asked.append(grammar)
        return len(asked) > 20

    bench.executor.prepare = prepare  # type: ignore[attr-defined]
    port = bench.run()
    assert all(port.answer(each).choices == {0: expected(each)} for each in (held, plain))
    ends = [delta.request_id for delta in port.deltas if delta.finish_reason is not None]
    assert ends == ["plain", "held"]


@pytest.mark.parametrize("n", [1, 2])
def test_a_choice_that_ends_while_its_grammar_is_compiled_delays_no_step(n: int) -> None:
    """The scheduler does not get its request before: the first step of it would block until the grammar is compiled."""
    output = (1, 2, 3) if n == 1 else ()
    held = msgspec.structs.replace(request("held", n=n, output_ids=output), grammar=Grammar("regex", "a"))
    bench, compiled = Bench(), False
    bench.executor.prepare = lambda grammar: compiled  # type: ignore[method-assign]
    bench.core.step(adds(held, request("plain")))
    bench.core.step([Finish("held", 0, "stop", 2)])
    assert {delta.request_id for delta in bench.port.deltas} == {"plain"}
    assert not bench.scheduler.finish("held", 0, "stop", 2, bench.clock.now), "the scheduler has the request"
    compiled = True
    bench.port.batches.append([])
    answer = bench.run().answer(held)
    assert (answer.choices[0], answer.reasons[0]) == (list(output[:2]), "stop")
    assert n == 1 or answer.choices[1] == expected(held, 1)


def test_a_grammar_that_cannot_be_prepared_is_that_requests_alone(caplog: pytest.LogCaptureFixture) -> None:
    held, plain = (request(name, seed=i + 1) for i, name in enumerate(("held-0", "plain")))
    bench = Bench(adds(msgspec.structs.replace(held, grammar=Grammar("regex", "a")), plain))

    def prepare(grammar: Grammar) -> bool:
        raise OSError("no tokenizer")

    bench.executor.prepare = prepare  # type: ignore[attr-defined]
    port = bench.run()
    (error,) = [delta.error for delta in port.deltas if delta.request_id == "held-0"]
    assert "no tokenizer" in error
    assert port.answer(plain).choices == {0: expected(plain)}
    assert [record.fields for record in caplog.records] == [{"answer_id": "held"}]  # type: ignore[attr-defined]
