"""Plans ahead of their results."""

import pytest

from tests.schedule.simulated import Simulation, request, simulation


def sampled(sim: Simulation, seq: int) -> int:
    return sum(work.sample for plan in sim.plans for work in plan.work if work.seq == seq)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_up_to_depth_plans_are_outstanding(depth: int) -> None:
    sim = simulation(depth=depth)
    sim.add(request("a", 8, 20))
    for _ in range(depth):
        assert sim.plan() is not None
    assert sim.plan() is None
    sim.run()
    sim.check_output("a")


def test_a_decode_is_planned_while_its_token_is_unknown() -> None:
    sim = simulation(depth=3)
    sim.add(request("a", 8, 20))
    plans = [sim.plan() for _ in range(3)]
    assert [[(w.count, w.sample) for w in plan.work] for plan in plans if plan] == [
        [(8, True)],
        [(1, True)],
        [(1, True)],
    ]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_stop_wastes_at_most_depth_less_one_tokens(depth: int) -> None:
    sim = simulation(depth=depth)
    for i in range(20):
        sim.add(request(f"r{i}", 5, 30, stop_token_ids=tuple(range(5))))
    sim.run()
    sim.check_drained()
    for number, ((name, _), output) in enumerate(sim.outputs.items()):
        sim.check_output(name)
        assert 0 <= sampled(sim, number + 1) - len(output.token_ids) <= depth - 1


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_nothing_is_planned_beyond_max_tokens(depth: int) -> None:
    sim = simulation(depth=depth)
    sim.add(request("a", 5, 7))
    sim.run()
    assert sampled(sim, 1) == 7


def test_a_finished_sequences_results_are_dropped() -> None:
    sim = simulation(depth=4)
    sim.add(request("a", 4, 20))
    sim.add(request("b", 4, 20))
    for _ in range(4):
        sim.plan()
    sim.apply()
    sim.finish("a", 0, keep=1)
    for _ in range(3):
        assert {delta.request_id for delta in sim.apply()} == {"b"}
    sim.run()
    sim.check_output("b")
    assert len(sim.outputs["a", 0].token_ids) == 1


def test_a_freed_block_waits_for_the_plans_that_may_touch_it() -> None:
    sim = simulation(depth=2, blocks=4, max_num_seqs=2, enable_prefix_caching=False, max_num_batched_tokens=16)
    sim.add(request("a", 9, 3))
    sim.plan()
    sim.add(request("b", 9, 3))
    sim.abort("a")
    assert sim.plan() is None  # all three blocks are fenced by the outstanding plan
    sim.apply()
    assert sim.plan() is not None
    sim.run()
    sim.check_output("b")


def test_nobody_is_preempted_for_a_block_that_comes_with_the_next_result() -> None:
    sim = simulation(depth=2, blocks=12, enable_prefix_caching=False)
    for name, length in (("a", 12), ("b", 8), ("c", 9), ("d", 5)):
        sim.add(request(name, length, 5))
    first = sim.plan()
    assert first is not None
    a, _, _, d = (new.seq for new in first.new)
    sim.abort("c")  # its three blocks are fenced
    second = sim.plan()
    assert second is not None
    assert [work.seq for work in second.work] == [a, d]  # "a" took the last block, "b" waits for one
    assert sim.scheduler.stats().preemptions == 0
    sim.run()
    for name in "abd":
        sim.check_output(name)
    assert sim.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("event", ["finish", "abort"])
def test_an_end_between_a_plan_and_its_result(event: str, depth: int) -> None:
    """Freed blocks stay fenced until the outstanding plan, which still writes to them, has been applied."""
    sim = simulation(depth=depth, enable_prefix_caching=False)
    for i in range(2):
        sim.add(request(f"r{i}", 5 + i, 40))
    for _ in range(4):
        sim.step()
    plan = sim.plan()
    assert plan is not None and len(plan.work) == 2
    held = sim.scheduler.stats().blocks_held[0]
    if event == "finish":
        sim.finish("r0", 0, 2)
    else:
        sim.abort("r0")
    assert len(sim.outputs["r0", 0].token_ids) == (2 if event == "finish" else 4)
    pool = sim.scheduler._cache.pools[0]
    assert pool.fenced == held - pool.held > 0
    sim.add(request("next", 20, 5))
    while sim.outstanding:
        sim.apply()
    assert pool.fenced == 0
    sim.run()
    sim.check_drained()
    sim.check_output("r1")
    sim.check_output("next")
