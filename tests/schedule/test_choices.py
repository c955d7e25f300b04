"""n > 1: choices that share the blocks of their prompt."""

import pytest

from penstock.messages import SequenceResult, StepResult, Window
from tests.schedule.simulated import request, simulation


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [(0,), (0, 8), (0, Window(11, chunked=True))])
@pytest.mark.parametrize("length", [1, 3, 4, 10, 16])
def test_choices_share_the_prompt(caching: bool, windows: tuple[int | Window, ...], length: int) -> None:
    sim = simulation(windows=windows, enable_prefix_caching=caching)
    sim.add(request("a", length, 9, n=4))
    sim.run()
    sim.check_drained()
    for choice in range(4):
        sim.check_output("a", choice)
    # The prompt is computed once; each further choice computes its last token only.
    assert [work.count for work in sim.plans[0].work] == [length]
    assert [work.count for work in sim.plans[1].work] == [1] * 4
    copies = [copy for plan in sim.plans for copy in plan.copies]
    assert len(copies) == (3 * len(windows) if length > 1 and (length - 1) % 4 else 0)


@pytest.mark.parametrize("length", [4, 9, 10, 11])
def test_a_small_window_may_have_passed_what_the_others_need(length: int) -> None:
    """They see one token more than the first choice does after its prompt, so a block of theirs may be gone."""
    sim = simulation(windows=(3,), enable_prefix_caching=False)
    sim.add(request("a", length, 9, n=3))
    sim.run()
    sim.check_drained()
    for choice in range(3):
        sim.check_output("a", choice)


def test_only_the_last_block_is_copied() -> None:
    sim = simulation()
    sim.add(request("a", 11, 2, n=3))
    sim.step()
    assert sim.scheduler.stats().blocks_held == (3,)
    plan = sim.plan()
    assert plan is not None
    assert [new.num_computed for new in plan.new] == [10, 10]
    shared = {new.blocks[0][:2] for new in plan.new}
    assert len(shared) == 1
    assert len({copy.source for copy in plan.copies}) == 1
    assert {copy.target for copy in plan.copies} == {new.blocks[0][2] for new in plan.new}
    assert sim.scheduler.stats().blocks_held == (2 + 3,)


def test_choices_have_their_own_numbers() -> None:
    sim = simulation()
    sim.add(request("a", 5, 4, n=3, first_choice=5))
    sim.run()
    assert sorted(choice for _, choice in sim.outputs) == [5, 6, 7]
    for choice in (5, 6, 7):
        sim.check_output("a", choice)


def test_more_choices_than_rows() -> None:
    sim = simulation(max_num_seqs=2, max_num_batched_tokens=16)
    sim.add(request("a", 9, 6, n=7))
    sim.add(request("b", 9, 6))
    sim.run()
    sim.check_drained()
    for choice in range(7):
        sim.check_output("a", choice)
    sim.check_output("b")


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_too_small_for_all_choices(caching: bool) -> None:
    sim = simulation(blocks=7, enable_prefix_caching=caching)
    sim.add(request("a", 10, 14, n=5))
    sim.run()
    sim.check_drained()
    for choice in range(5):
        sim.check_output("a", choice)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("steps", range(5))
def test_the_first_choice_ends_early(depth: int, steps: int) -> None:
    sim = simulation(depth=depth, max_num_batched_tokens=8)
    sim.add(request("a", 18, 6, n=3))
    for _ in range(steps):
        sim.step()
    sim.plan()
    sim.finish("a", 0, keep=0)
    sim.run()
    sim.check_drained()
    assert sim.outputs["a", 0].token_ids == []
    for choice in (1, 2):
        sim.check_output("a", choice)


def test_a_choice_ends_before_it_has_begun() -> None:
    sim = simulation()
    sim.add(request("a", 8, 6, n=3))
    sim.finish("a", 2, keep=0)
    sim.step()
    sim.finish("a", 1, keep=0)
    sim.run()
    sim.check_drained()
    sim.check_output("a", 0)


def test_a_late_choice_after_the_window_has_passed_the_prompt() -> None:
    """The first choice no longer has the blocks that the others need, and the cache is off."""
    sim = simulation(windows=(4,), max_num_seqs=1, enable_prefix_caching=False)
    sim.add(request("a", 9, 20, n=2))
    sim.run()
    sim.check_output("a", 0)
    sim.check_output("a", 1)


def test_cached_tokens_are_the_requests() -> None:
    sim = simulation()
    first = request("a", 16, 2)
    sim.add(first)
    sim.run()
    sim.add(request("b", (*first.prompt_ids, 1, 2), 3, n=3))
    sim.run()
    for choice in range(3):
        final = sim.outputs["b", choice].final
        assert final is not None
        assert final.cached_tokens == 16


def test_a_failure_ends_every_choice_of_its_request() -> None:
    sim = simulation()
    sim.add(request("a", 8, 6, n=3))
    sim.step()
    plan = sim.plan()
    assert plan is not None
    good = sim.executor.result().results
    bad = SequenceResult(plan.work[1].seq, error="broken")
    result = StepResult(plan.plan_id, (good[0], bad, good[2]))
    deltas = sim.scheduler.apply(result, sim.now)
    assert [(d.choice, d.finish_reason) for d in deltas] == [(0, None), (0, "error"), (1, "error"), (2, "error")]
    sim.check_drained()
