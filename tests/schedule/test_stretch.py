"""Steps in a row that only give tokens: the same plans and tokens, whether the scheduler looks at each or not."""

import random
from collections import Counter

import pytest

from penstock.messages import NextTokens, StepPlan, StepResult, TokenDelta
from tests.schedule.simulated import Simulation, request, simulation


def decoding(count: int, max_tokens: int = 40, **fields: object) -> Simulation:
    """So many sequences that have begun to decode."""
    sim = simulation(enable_prefix_caching=False, **fields)
    for i in range(count):
        sim.add(request(f"r{i}", 5 + i, max_tokens))
    sim.step()
    return sim


def follow(sim: Simulation) -> tuple[StepPlan, NextTokens]:
    plan = sim.scheduler.plan(sim.now)
    assert plan is not None
    sim.executor.submit(plan)
    result = sim.executor.results.popleft()[0]
    tokens = tuple(answer.token_ids[0] for answer in result.results)
    followed = sim.scheduler.follow(StepResult(result.plan_id, (), token_ids=tokens), sim.now)
    assert followed is not None
    return plan, followed


def test_plans_are_of_the_same_work_and_grant_blocks_one_by_one() -> None:
    sim = decoding(4)
    steps = [follow(sim) for _ in range(20)]
    plans = [plan for plan, _ in steps]
    assert all(plan.work is plans[0].work and not (plan.new or plan.gone) for plan in plans)
    granted = Counter(seq for plan in plans for seq, _ in plan.blocks)
    assert granted == {1: 5, 2: 5, 3: 5, 4: 5}
    assert max(len(plan.blocks) for plan in plans) == 1, "their prompts end at different places of a block"
    assert [tokens.steps for _, tokens in steps] == list(range(20))
    assert all(tokens.choices is steps[0][1].choices for _, tokens in steps)
    sim._take([delta for _, tokens in steps for delta in tokens.deltas()])
    sim.run()
    sim.check_drained()
    for i in range(4):
        sim.check_output(f"r{i}")


def test_the_stats_go_on() -> None:
    sim = decoding(3)
    before = sim.scheduler.stats()
    for _ in range(10):
        follow(sim)
    stats = sim.scheduler.stats()
    assert (stats.steps - before.steps, stats.computed_tokens - before.computed_tokens) == (10, 30)
    assert sim.scheduler.blocks == tuple(zip(stats.blocks_held, stats.blocks_cached, strict=True))
    assert stats.blocks_held > before.blocks_held


def test_a_token_that_may_stop_a_sequence_is_not_followed() -> None:
    sim = decoding(2)
    sim._take(follow(sim)[1].deltas())
    sim.add(request("stops", 6, 30, stop_token_ids=(3,)))
    sim.step()
    plan = sim.scheduler.plan(sim.now)
    assert plan is not None and len(plan.work) == 3
    assert sim.scheduler.follow(StepResult(plan.plan_id, (), token_ids=(3, 1, 1)), sim.now) is None
    assert sim.scheduler.follow(StepResult(plan.plan_id, (), token_ids=(1, 1)), sim.now) is None
    assert sim.scheduler.follow(StepResult(plan.plan_id + 1, (), token_ids=(1, 1, 1)), sim.now) is None
    with pytest.raises(ValueError, match="is answered with 2 tokens; due are 3"):
        sim.scheduler.apply(StepResult(plan.plan_id, (), token_ids=(1, 1)), sim.now)
    deltas = sim.scheduler.apply(StepResult(plan.plan_id, (), token_ids=(3, 1, 3)), sim.now)
    assert [(delta.token_ids, delta.finish_reason) for delta in deltas] == [((3,), None), ((1,), None), ((3,), "stop")]


def test_what_a_stretch_has_computed_can_be_found() -> None:
    sim = simulation()
    first = request("a", 8, 40)
    sim.add(first)
    sim.step()
    deltas = [delta for _ in range(20) for delta in follow(sim)[1].deltas()]
    sim._take(deltas)
    sim.add(request("b", (*first.prompt_ids, *sim.outputs["a", 0].token_ids), 4))
    sim.step()
    assert sim.scheduler.stats().prefix_hits == 28


@pytest.mark.parametrize("event", ["finish", "abort"])
def test_an_end_between_a_plan_and_its_result(event: str) -> None:
    """Freed blocks wait for the outstanding plan, which still writes to them."""
    sim = decoding(2)
    for _ in range(3):
        sim._take(follow(sim)[1].deltas())
    plan = sim.plan()
    assert plan is not None and len(plan.work) == 2
    if event == "finish":
        sim.finish("r0", 0, 2)
    else:
        sim.abort("r0")
    assert len(sim.outputs["r0", 0].token_ids) == (2 if event == "finish" else 4)
    sim.add(request("next", 20, 5))
    sim.apply()
    sim.run()
    sim.check_drained()
    sim.check_output("r1")
    sim.check_output("next")


def steps_of(seed: int, *, short: bool, blocks: int, **options: object) -> list[tuple[StepPlan, list[TokenDelta]]]:
    """Requests that come, stop, are ended and preempted at random: every plan, and the deltas of each."""
    source = random.Random(seed)
    sim = simulation(blocks=blocks, executor={"short": short}, **options)
    sim.scheduler.check = lambda: None  # type: ignore[method-assign]
    seen = []
    for turn in range(300):
        if source.random() < 0.08:
            stops = tuple(source.sample(range(10), 2)) if source.random() < 0.3 else ()
            sim.add(request(f"r{turn}", source.randint(1, 20), source.randint(1, 40), stop_token_ids=stops))
        live = sorted(sim.scheduler._roster.requests)
        if live and source.random() < 0.02:
            sim.abort(source.choice(live))
        if live and source.random() < 0.02:
            sim.finish(source.choice(live), 0, source.randint(0, 10))
        plan = sim.plan()
        seen.append((plan, sorted(sim.apply(), key=str)) if plan else (StepPlan(0, ()), []))
    sim.run()
    del sim.scheduler.check
    sim.check_drained()
    return seen


@pytest.mark.parametrize("blocks", [20, 65])
@pytest.mark.parametrize("seed", range(6))
def test_results_in_the_short_form_change_no_plan(seed: int, blocks: int) -> None:
    ours, theirs = (steps_of(seed, short=each, blocks=blocks, enable_prefix_caching=False) for each in (True, False))
    assert [deltas for _, deltas in ours] == [deltas for _, deltas in theirs]
    assert [plan for plan, _ in ours] == [plan for plan, _ in theirs]


@pytest.mark.parametrize("windows", [(0,), (6,), (0, 9)])
def test_short_results_with_windows_and_a_prefix_cache(windows: tuple[int, ...]) -> None:
    assert steps_of(1, short=True, blocks=33, windows=windows)
