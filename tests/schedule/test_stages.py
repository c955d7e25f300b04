"""Plans that overlap in the stages of a pipeline: none builds upon a token that another has yet to sample."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.messages import StepPlan
from tests.schedule.simulated import Simulation, request, simulation

DEPTHS = [2, 3, 4]


def stages(depth: int, **limits: object) -> Simulation:
    return simulation(depth=depth, late_ids=False, **limits)


def decoding(depth: int, count: int, **limits: object) -> Simulation:
    """`count` sequences that have all begun to decode, and a full pipeline."""
    sim = stages(depth, blocks=513, **{"max_num_seqs": max(count, 2), "max_num_batched_tokens": 256, **limits})
    for i in range(count):
        sim.add(request(f"r{i}", 4, 50))
    while sim.scheduler.stats().waiting or any(len(o.token_ids) < 2 for o in sim.outputs.values()):
        sim.step()
    for _ in range(2 * depth):
        sim.step()
    return sim


def sequences(plan: StepPlan) -> set[int]:
    return {work.seq for work in plan.work}


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16])
def test_the_pipeline_is_full_of_even_shares(depth: int, count: int) -> None:
    sim = decoding(depth, count)
    for _ in range(10):
        while sim.plan() is not None:
            pass
        outstanding = sim.plans[-sim.outstanding :]
        assert len(outstanding) == min(depth, count)
        assert sum(len(plan.work) for plan in outstanding) == count
        assert max(len(plan.work) for plan in outstanding) <= -(-count // depth)
        sim.apply()


@pytest.mark.parametrize("depth", DEPTHS)
def test_who_decodes_has_its_turn_in_every_round(depth: int) -> None:
    sim = decoding(depth, 12)
    first = len(sim.plans)
    while len(sim.plans) < first + 10 * depth:
        sim.step()
    for round_ in range(10):
        begin = first + round_ * depth
        turns = Counter(seq for plan in sim.plans[begin : begin + depth] for seq in sequences(plan))
        assert set(turns.values()) == {1} and len(turns) == 12


@pytest.mark.parametrize("depth", DEPTHS)
def test_chunks_of_a_prompt_follow_each_other_at_once(depth: int) -> None:
    sim = stages(depth, max_num_batched_tokens=4 * depth)
    sim.add(request("a", 40, 3))
    plans = [sim.plan() for _ in range(depth)]
    assert [[(w.count, w.sample) for w in plan.work] for plan in plans if plan] == [[(4, False)]] * depth
    sim.run()
    sim.check_output("a")


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_token_is_waited_for(depth: int) -> None:
    sim = stages(depth)
    sim.add(request("a", 8, 20))
    assert sim.plan() is not None
    assert sim.plan() is None
    sim.apply()
    assert sim.plan() is not None


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_long_prompt_does_not_hold_up_those_that_decode(depth: int) -> None:
    sim = decoding(depth, 8, max_num_seqs=9, max_num_batched_tokens=16 * depth, max_model_len=256)
    sim.add(request("long", 200, 5, priority=-1))  # first in order
    before = {name: len(output.token_ids) for (name, _), output in sim.outputs.items()}
    plans = len(sim.plans)
    while not sim.outputs["long", 0].token_ids:
        sim.step()
    rounds = (len(sim.plans) - plans) // depth
    assert rounds >= 200 // (16 * depth)
    for name, length in before.items():
        if name != "long":
            assert len(sim.outputs[name, 0].token_ids) >= min(length + rounds - 2, 50)


@pytest.mark.parametrize("depth", DEPTHS)
def test_those_that_decode_do_not_hold_up_a_prompt(depth: int) -> None:
    """The budget is the least there can be: a token for every sequence that runs."""
    sim = stages(depth, blocks=513, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=128)
    for i in range(7):
        sim.add(request(f"r{i}", 2, 60))
    while sim.scheduler.stats().waiting:
        sim.step()
    sim.add(request("late", 30, 3))
    sim.run()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)
    ends = [plan.plan_id for plan in sim.plans for work in plan.work if work.seq == 8 and work.sample]
    last = sim.plans[-1].plan_id
    assert ends[0] < last  # while the others still ran


@settings(max_examples=40)
@given(
    depth=st.integers(2, 4),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=20),
    blocks=st.integers(20, 80),
    seqs=st.integers(2, 8),
    extra=st.integers(0, 24),
)
def test_nobody_starves(depth: int, lengths: list[tuple[int, int]], blocks: int, seqs: int, extra: int) -> None:
    """From one token of a sequence to its next it takes two rounds at most; and in the end everybody has its tokens."""
    sim = stages(depth, blocks=blocks, max_num_seqs=seqs, max_num_batched_tokens=seqs + extra)
    for i, (prompt, output) in enumerate(lengths):
        sim.add(request(f"r{i}", prompt, output))
    sim.run(limit=4000)
    sim.check_drained()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)
    if sim.scheduler.stats().preemptions == 0:
        assert longest_pause(sim) <= 2 * depth


def longest_pause(sim: Simulation) -> int:
    """The most plans from one token of a sequence to its next."""
    last: dict[int, int] = {}
    pause = 0
    for plan in sim.plans:
        for work in plan.work:
            if work.seq in last:
                pause = max(pause, plan.plan_id - last[work.seq])
            if work.sample:
                last[work.seq] = plan.plan_id
    return pause
