"""The simulated executor notices plans that break the contract, and keeps to its clock."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.messages import BlockCopy, Capacity, GenerateRequest, KVGroup, StepPlan, Work
from penstock.schedule import Scheduler, SchedulerConfig
from tests.plan_checks import VOCABULARY, PlanError, SimulatedExecutor, VirtualClock
from tests.schedule.simulated import request

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64)
change = msgspec.structs.replace


class Bench:
    """A scheduler and an executor, with one plan after the other."""

    def __init__(self, *requests: GenerateRequest, depth: int = 1, late_ids: bool = True, **options: Any) -> None:
        capacity = Capacity(4, (KVGroup(33),), depth, vocab_size=VOCABULARY, late_ids=late_ids)
        self.clock = VirtualClock()
        self.scheduler = Scheduler(LIMITS, capacity)
        self.executor = SimulatedExecutor(capacity, LIMITS, self.clock, **options)
        for asked in requests:
            self.scheduler.add(asked, 0.0)

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan(self.clock.now)
        assert plan is not None
        return plan


def block_of_another(plan: StepPlan) -> StepPlan:
    first, second = plan.new
    return change(plan, new=(first, change(second, blocks=first.blocks)))


def of_first(plan: StepPlan, **changes: Any) -> StepPlan:
    """The plan with a changed first sequence."""
    return change(plan, new=(change(plan.new[0], **changes), *plan.new[1:]))


def more_tokens(plan: StepPlan) -> StepPlan:
    return change(plan, work=(change(plan.work[0], count=plan.work[0].count + 1), *plan.work[1:]))


# Each changes the plan that computes two prompts of six tokens, in its first step.
BROKEN: list[tuple[str, Callable[[StepPlan], StepPlan]]] = [
    ("plan 2 follows plan 0", lambda plan: change(plan, plan_id=2)),
    ("computes 0 tokens", lambda plan: change(plan, work=())),
    ("computes 33 tokens", lambda plan: change(plan, work=(change(plan.work[0], count=27), plan.work[1]))),
    ("two units of work", lambda plan: change(plan, work=plan.work[:1] * 2)),
    ("does not fit 6 tokens", more_tokens),
    ("does not fit 6 tokens", lambda plan: change(plan, work=(change(plan.work[0], sample=False),))),
    ("does not fit 6 tokens", lambda plan: change(plan, work=(Work(plan.work[0].seq, 5, True),))),
    ("sequence 1 is not new", lambda plan: change(plan, new=plan.new[:1] * 2)),
    ("5 sequences", lambda plan: change(plan, new=tuple(change(plan.new[0], seq=seq) for seq in range(1, 6)))),
    ("computed: 6", lambda plan: of_first(plan, num_computed=6)),
    ("gets no block", lambda plan: change(plan, blocks=((1, ((),)),))),
    ("sequence 2 also writes", block_of_another),
    ("does not exist", lambda plan: of_first(plan, blocks=((0, 1),))),
    ("does not exist", lambda plan: of_first(plan, blocks=((33, 1),))),
    ("has not token 0", lambda plan: change(of_first(plan, num_computed=4), work=(Work(1, 2, True),))),
    ("its limit is 6", lambda plan: of_first(plan, sampling=change(plan.new[0].sampling, max_tokens=0))),
    ("sequence 9 is unknown", lambda plan: change(plan, gone=(9,))),
    ("sequence 9 is unknown", lambda plan: change(plan, blocks=((9, ((5,),)),))),
    ("sequence 9 is unknown", lambda plan: change(plan, work=(Work(9, 1, True),))),
    ("nothing was written to block 7", lambda plan: change(plan, copies=(BlockCopy(0, 7, 8),))),
    ("depend on their order", lambda plan: change(plan, copies=(BlockCopy(0, 1, 2), BlockCopy(0, 2, 3)))),
]


@pytest.mark.parametrize(("message", "broken"), BROKEN)
def test_a_plan_that_breaks_the_contract_is_refused(message: str, broken: Callable[[StepPlan], StepPlan]) -> None:
    bench = Bench(request("a", 6), request("b", 6))
    plan = bench.plan()
    with pytest.raises(PlanError, match=message):
        bench.executor.submit(broken(plan))


def test_a_block_that_an_outstanding_plan_uses_is_not_written() -> None:
    bench = Bench(request("a", 8, 4), depth=2)
    plan = bench.plan()
    bench.executor.submit(plan)
    (blocks,) = plan.new[0].blocks
    other = change(plan.new[0], seq=9, blocks=(blocks,))
    with pytest.raises(PlanError, match="an outstanding plan may still use"):
        bench.executor.submit(StepPlan(2, (Work(9, 8, True),), (other,), gone=(plan.new[0].seq,)))


def test_a_block_with_other_content_is_not_read() -> None:
    bench = Bench(request("a", 6, 8))
    first = bench.plan()
    bench.executor.submit(first)
    bench.scheduler.apply(bench.executor.result(), 0.0)
    plan = bench.plan()
    # The first block is full, so that another sequence may write into it once more, but then it must not be read.
    other = change(first.new[0], seq=9, token_ids=(1, 2, 3), num_prompt=3, blocks=(first.new[0].blocks[0][:1],))
    bench.executor.submit(change(plan, work=(Work(9, 3, True),), new=(other,)))
    bench.executor.result()
    with pytest.raises(PlanError, match="has not token 0 of sequence 1"):
        bench.executor.submit(change(plan, plan_id=3))


def test_a_stage_needs_no_token_that_is_not_known() -> None:
    bench = Bench(request("a", 6, 8), depth=2, late_ids=False)
    plan = bench.plan()
    bench.executor.submit(plan)
    with pytest.raises(PlanError, match=r"last tokens of sequences \[1\] are not known"):
        bench.executor.submit(StepPlan(2, (Work(1, 1, True),)))


def test_a_stage_leaves_work_to_the_others() -> None:
    bench = Bench(request("a", 20, 8), depth=2, late_ids=False)
    plan = bench.plan()
    with pytest.raises(PlanError, match="computes 17 tokens: the share of one in 2 is 16"):
        bench.executor.submit(more_tokens(plan))


def test_drafts_follow_a_token_that_is_known() -> None:
    bench = Bench(request("a", 6, 8), depth=2)
    bench.executor.submit(bench.plan())
    with pytest.raises(PlanError, match="drafts of sequence 1 do not follow its last token"):
        bench.executor.submit(StepPlan(2, (Work(1, 2, True, (5,)),)))


def test_more_plans_than_the_depth_are_refused() -> None:
    bench = Bench(request("a", 6, 8))
    bench.executor.submit(bench.plan())
    with pytest.raises(PlanError, match="one too many"):
        bench.executor.submit(StepPlan(2, (Work(1, 1, True),)))


def test_slots_are_checked_only_if_that_is_asked_for() -> None:
    bench = Bench(request("a", 6), request("b", 6), checks_slots=False)
    bench.executor.submit(block_of_another(bench.plan()))


def test_plans_follow_each_other_on_the_clock() -> None:
    bench = Bench(request("a", 6, 8), depth=2, seconds=lambda plan: 0.5 * plan.plan_id)
    executor, clock = bench.executor, bench.clock
    clock.now = 10.0
    for _ in range(2):
        executor.submit(bench.plan())
    assert executor.result_at == 10.5
    with pytest.raises(RuntimeError, match=r"the result comes at 10\.5 s"):
        executor.result()
    clock.now = 10.5
    assert executor.result().timing.total == 0.5
    assert executor.result_at == 11.5
    clock.now = 20.0
    assert executor.result().plan_id == 2
