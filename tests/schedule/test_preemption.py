"""Too few blocks: who gives way, who goes on, and that everything ends."""

import pytest

from penstock.messages import Window
from tests.plan_checks import logprob_row
from tests.schedule.simulated import Simulation, request, simulation


def run_many(sim: Simulation, count: int, prompt: int, max_tokens: int, **fields: object) -> None:
    for i in range(count):
        sim.add(request(f"r{i}", prompt, max_tokens, **fields))
    sim.run()
    sim.check_drained()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("windows", [(0,), (0, 8), (0, Window(8, chunked=True))])
def test_64_requests_through_a_pool_that_holds_3(depth: int, windows: tuple[int | Window, ...]) -> None:
    sim = simulation(blocks=3 * 6 + 1, windows=windows, depth=depth, max_num_seqs=64)
    run_many(sim, 64, 8, 16)  # 23 computed tokens: 6 blocks
    assert sim.scheduler.stats().preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_that_holds_1(caching: bool) -> None:
    sim = simulation(blocks=7, depth=2, enable_prefix_caching=caching)
    run_many(sim, 6, 5, 19, n=2)


def test_the_first_is_never_preempted() -> None:
    sim = simulation(blocks=12, max_num_seqs=6)
    run_many(sim, 6, 7, 25)
    first = sim.outputs["r0", 0].final
    assert first is not None and first.timing is not None
    assert first.timing.preemptions == 0
    assert sim.scheduler.stats().preemptions > 0


def test_the_one_of_least_priority_gives_way() -> None:
    sim = simulation(blocks=11, max_num_seqs=2)
    sim.add(request("low", 7, 25, priority=1))
    sim.step()
    sim.add(request("high", 7, 25, priority=0))
    sim.run()
    timings = {name: sim.outputs[name, 0].final.timing for name in ("low", "high")}  # type: ignore[union-attr]
    assert timings["high"].preemptions == 0
    assert timings["low"].preemptions == 1
    sim.check_output("low")


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("late_ids", [True, False])
def test_a_request_of_higher_priority_takes_a_place_at_once(depth: int, late_ids: bool) -> None:
    sim = simulation(max_num_seqs=3, depth=depth, late_ids=late_ids)
    for i in range(6):
        sim.add(request(f"low{i}", 7, 25, priority=3600))
    for _ in range(5):
        sim.step()
    sim.add(request("later", 7, 25, priority=3600))
    for i in range(2):
        sim.add(request(f"high{i}", 7, 5))
    sim.abort("low0")  # its place is free while tokens of preempted ones are still in flight
    for _ in range(depth + 1):
        sim.step()
    assert all(sim.outputs[f"high{i}", 0].token_ids for i in range(2))
    sim.run()
    sim.check_drained()
    assert sim.scheduler.stats().preemptions == 1
    for name, choice in sim.outputs:
        if name != "low0":
            sim.check_output(name, choice)


def test_a_place_is_not_taken_by_arrival_or_deadline_alone() -> None:
    sim = simulation(max_num_seqs=1)
    sim.add(request("first", 7, 25))
    sim.step()
    sim.add(request("second", 7, 5, deadline=sim.now + 5))
    sim.run()
    assert sim.scheduler.stats().preemptions == 0


def test_what_was_published_is_found_when_it_comes_back() -> None:
    sim = simulation(blocks=12, max_num_seqs=2)
    sim.add(request("a", 7, 25))
    sim.add(request("b", 7, 25))
    sim.run()
    seq = sim.plans[0].new[1].seq
    back = [new for plan in sim.plans[1:] for new in plan.new if new.seq == seq]
    assert back
    assert all(new.num_computed > 0 for new in back)
    assert any(seq in plan.gone for plan in sim.plans)


def test_no_preemption_storm() -> None:
    """Coming back only when all fits, a sequence is preempted a few times in its life, not every step."""
    sim = simulation(blocks=25, max_num_seqs=32)
    run_many(sim, 32, 8, 30)
    preemptions = sim.scheduler.stats().preemptions
    assert preemptions < 2 * 32
    assert sim.scheduler.stats().computed_tokens < 1.5 * 32 * 37


def test_finish_while_preempted() -> None:
    sim = simulation(blocks=12, max_num_seqs=3)
    for name in "abc":
        sim.add(request(name, 7, 25))
    while sim.scheduler.stats().preemptions == 0:
        sim.step()
    had = len(sim.outputs["c", 0].token_ids)
    assert had > 2
    sim.finish("c", 0, keep=2)
    sim.run()
    sim.check_drained()
    sim.check_output("a")
    sim.check_output("b")
    assert len(sim.outputs["c", 0].token_ids) == 2


def test_tokens_in_flight_at_a_preemption_are_kept() -> None:
    sim = simulation(blocks=12, max_num_seqs=2, depth=3)
    sim.add(request("a", 7, 25))
    sim.add(request("b", 7, 25))
    known: dict[int, int] = {}
    while sim.scheduler.has_work:
        sim.step()
    for plan in sim.plans:
        for new in plan.new:
            # It comes back with all the tokens it was ever given: what it computes again is its prompt, so to speak.
            assert len(new.token_ids) >= known.get(new.seq, 0)
            known[new.seq] = len(new.token_ids)
    assert sim.scheduler.stats().preemptions > 0
    sim.check_output("a")
    sim.check_output("b")


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_prompt_logprobs_are_neither_lost_nor_doubled(depth: int) -> None:
    sim = simulation(blocks=13, depth=depth, max_num_batched_tokens=8)
    for name in "abcd":
        sim.add(request(name, 17, 20, prompt_logprobs=0))
    sim.run()
    assert sim.scheduler.stats().preemptions > 0
    for name in "abcd":
        rows = b"".join(logprob_row(token) for token in sim.requests[name].prompt_ids[1:])
        assert sim.outputs[name, 0].prompt_logprobs == rows
        sim.check_output(name)
