"""Plans ahead of their results, and drafts."""

import random
from collections import Counter

import pytest

from penstock.messages import Window
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


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (0, Window(6, chunked=True))])
def test_drafts_change_no_token(depth: int, accuracy: float, windows: tuple[int | Window, ...]) -> None:
    sim = simulation(depth=depth, num_drafts=3, windows=windows, executor={"draft_accuracy": accuracy})
    for i in range(5):
        sim.add(request(f"r{i}", 3 + 3 * i, 20, logprobs=0, stop_token_ids=(1, 2, 3), n=1 + i % 2))
    sim.run()
    sim.check_drained()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)


def test_a_plan_behind_drafts_reserves_blocks_for_the_most() -> None:
    """Three drafts each: whatever the first plan's step accepts, the second one's tokens have their slots."""
    sim = simulation(depth=2, num_drafts=3, executor={"draft_accuracy": 0.0})
    sim.add(request("a", 8, 30))
    sim.step()
    while sim.outstanding:
        sim.apply()
    (sequence,) = sim.scheduler._live.running
    before = sequence.computed
    first, second = sim.plan(), sim.plan()
    assert first is not None and second is not None
    assert [(w.count, w.sample, w.drafts) for w in (*first.work, *second.work)] == [(4, True, 3)] * 2
    assert sequence.planned == before + 8 <= sequence.slots
    assert sequence.expected == sequence.planned + 1
    sim.apply()  # all three drafts are refused: one token is known, and the second plan is still outstanding
    assert (sequence.computed, sequence.planned) == (before + 1, before + 5)
    assert (len(sequence.tokens), sequence.expected) == (before + 2, before + 6)
    sim.apply()
    assert sequence.computed == sequence.planned == before + 2
    sim.run()
    sim.check_output("a")


@pytest.mark.parametrize("late_ids", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_with_preemption_and_ends_in_between(seed: int, depth: int, late_ids: bool) -> None:
    """A random number of drafts is accepted. The scheduler proves its counts after every event."""
    source = random.Random(f"{seed}, {depth}")
    sim = simulation(
        depth=depth,
        late_ids=late_ids,
        num_drafts=3,
        blocks=20,
        windows=[(0,), (0, 8)][seed % 2],
        executor={"draft_accuracy": 0.6},
    )
    accepted: Counter[int] = Counter()
    kept: dict[str, int] = {}
    for turn in range(200):
        if source.random() < 0.3:
            stops = (1, 2) if source.random() < 0.3 else ()
            sim.add(request(f"r{turn}", source.randint(1, 20), source.randint(1, 40), stop_token_ids=stops))
        live = sorted(name for (name, _), output in sim.outputs.items() if output.finish_reason is None)
        if live and source.random() < 0.03:
            sim.abort(live.pop(source.randrange(len(live))))
        if live and source.random() < 0.03:
            name = source.choice(live)
            kept[name] = min(source.randint(0, 10), len(sim.outputs[name, 0].token_ids))
            sim.finish(name, 0, kept[name])
        while source.random() < 0.8 and sim.plan() is not None:
            pass
        if sim.outstanding and source.random() < 0.8:
            accepted.update(len(delta.token_ids) for delta in sim.apply())
    sim.run()
    sim.check_drained()
    assert all(accepted[count] for count in (1, 2, 3, 4))
    assert sim.scheduler.stats().preemptions
    for (name, _), output in sim.outputs.items():
        if output.finish_reason != "abort" and name not in kept:
            sim.check_output(name)


def test_accepted_drafts_save_steps() -> None:
    steps = {}
    for accuracy in (0.0, 1.0):
        sim = simulation(num_drafts=3, executor={"draft_accuracy": accuracy})
        sim.add(request("a", 8, 21))
        sim.run()
        steps[accuracy] = len(sim.plans)
    assert steps == {0.0: 21, 1.0: 1 + 5}


def test_rejected_drafts_are_never_published() -> None:
    """The executor checks each token against what its blocks hold, so a wrong draft in the cache would show."""
    sim = simulation(num_drafts=3, executor={"draft_accuracy": 0.4})
    for i in range(6):
        sim.add(request(f"r{i}", 6, 20, seed=1) if i else request("r0", 6, 20, seed=1))
        sim.run()
        turn = (*sim.requests[f"r{i}"].prompt_ids, *sim.outputs[f"r{i}", 0].token_ids)
        sim.add(request(f"next{i}", (*turn, 9), 5))
        sim.run()
        sim.check_output(f"next{i}")
        final = sim.outputs[f"next{i}", 0].final
        assert final is not None
        assert final.cached_tokens == 24


def test_drafts_keep_within_the_budget_and_the_length() -> None:
    sim = simulation(num_drafts=3, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=20)
    for i in range(4):
        sim.add(request(f"r{i}", 10, 100))
    sim.run()  # the executor checks both
    for i in range(4):
        sim.check_output(f"r{i}")


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
