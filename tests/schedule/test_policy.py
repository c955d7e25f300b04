"""Any policy may order the requests, also one that changes its order after each step."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule.live_requests import LiveRequests
from penstock.schedule.sequence import Sequence
from tests.schedule.policies import AnyOrder, FairShare, GivenOrder
from tests.schedule.simulated import Simulation, request, simulation


@contextmanager
def preemptions() -> Iterator[list[tuple[int, int]]]:
    """Records each preemption as the sequence that takes and the one that gives way. None is of the first in order."""
    found: list[tuple[int, int]] = []
    preempt = LiveRequests.preempt

    def record(live: LiveRequests, victim: Sequence, taker: Sequence | None) -> None:
        assert taker is not None
        assert victim.order > min(each.order for each in (*live.running, *live.waiting)), "it preempted the first"
        found.append((taker.id, victim.id))
        preempt(live, victim, taker)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveRequests, "preempt", record)
        yield found


@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(12, 24),
    seqs=st.integers(1, 4),
    extra_budget=st.integers(0, 8),
    depth=st.integers(1, 3),
    late_ids=st.booleans(),
    caching=st.booleans(),
    asked=st.lists(
        st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(1, 3), st.integers(-1, 1), st.integers(0, 6)),
        min_size=2,
        max_size=9,
    ),
)
@settings(max_examples=150)
def test_no_order_makes_sequences_preempt_each_other_in_turn(
    seed: int,
    blocks: int,
    seqs: int,
    extra_budget: int,
    depth: int,
    late_ids: bool,
    caching: bool,
    asked: list[tuple[int, int, int, int, int]],
) -> None:
    """A step always makes progress (`Simulation.plan` asserts it), and all end after a bounded number of steps."""
    sim = simulation(
        policy=AnyOrder(seed),
        blocks=blocks,
        depth=depth,
        late_ids=late_ids,
        max_num_seqs=seqs,
        max_num_batched_tokens=seqs + extra_budget,
        enable_prefix_caching=caching,
    )
    with preemptions() as found:
        for number, (prompt, max_tokens, n, priority, steps) in enumerate(asked):
            sim.add(request(f"r{number}", prompt, max_tokens, n=n, priority=priority))
            for _ in range(steps):
                sim.step()
        sim.run(limit=3000)
    sim.check_drained()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)
    assert not set(found) & {(victim, taker) for taker, victim in found}


def preempted(sim: Simulation) -> dict[str, int]:
    """How often each request was."""
    counts = {}
    for (name, _), output in sim.outputs.items():
        assert output.final is not None and output.final.timing is not None
        counts[name] = output.final.timing.preemptions
    return counts


def test_a_preempted_sequence_keeps_its_place() -> None:
    """It started before `late` came, so it starts again before it, whatever the policy says by then."""
    policy = GivenOrder(runs=0.0, gives_way=1.0, late=2.0)
    sim = simulation(policy=policy, blocks=12, max_num_seqs=2)
    sim.add(request("runs", 8, 32))
    sim.add(request("gives_way", 8, 32))
    sim.step()
    policy.places["gives_way"] = 3.0
    while not sim.scheduler.stats().preemptions:
        sim.step()
    sim.add(request("late", 28, 4))
    while sim.outputs["late", 0].finish_reason is None:
        sim.step()
    assert sim.outputs["gives_way", 0].finish_reason is not None
    sim.run()
    assert preempted(sim) == {"runs": 0, "gives_way": 1, "late": 0}
    for name in policy.places:
        sim.check_output(name)


def test_a_request_that_took_a_place_stays_before_the_one_that_had_it() -> None:
    """It waits for blocks meanwhile. If the other one could start again, it would be preempted again and again."""
    policy = GivenOrder(runs=0.0, low=2.0, high=1.0)
    sim = simulation(policy=policy, blocks=16, max_num_seqs=2)
    sim.add(request("runs", 28, 16))
    sim.add(request("low", 4, 12, priority=1))
    sim.step()
    sim.add(request("high", 36, 4))
    for step in range(8):
        sim.step()
        policy.places["high"] = 1.0 if step % 2 else 3.0
    assert not sim.outputs["high", 0].token_ids, "it was to lack blocks"
    sim.run()
    assert preempted(sim) == {"runs": 0, "low": 1, "high": 0}
    for name in policy.places:
        sim.check_output(name)


def test_waiting_requests_start_in_the_newest_order() -> None:
    policy = GivenOrder(runs=0.0, a=1.0, b=2.0, c=3.0)
    sim = simulation(policy=policy, max_num_seqs=1)
    for name in policy.places:
        sim.add(request(name, 4, 3, ignore_eos=True))
    sim.step()
    policy.places |= {"b": 9.0, "c": 0.5}
    sim.run()
    queued = {name: sim.outputs[name, 0].final.timing.queued for name in policy.places}  # type: ignore[union-attr]
    assert sorted(queued, key=queued.__getitem__) == ["runs", "c", "a", "b"]


@pytest.mark.parametrize("blocks", [65, 16])  # 16: too few for all that may run
def test_two_tenants_share_the_steps(blocks: int) -> None:
    """One sends ten times as many requests, and earlier. While both have some, each gets half of the tokens."""
    policy = FairShare()
    sim = simulation(policy=policy, max_num_seqs=3, blocks=blocks)
    for i in range(40):
        sim.add(request(f"many{i}", 8, 12, ignore_eos=True, tenant="many"))
    for _ in range(5):
        sim.step()
    for i in range(4):
        sim.add(request(f"few{i}", 8, 12, ignore_eos=True, tenant="few"))
    before = policy.computed.copy()
    while any(sim.outputs[f"few{i}", 0].finish_reason is None for i in range(4)):
        sim.step()
    gained = policy.computed - before
    assert gained["few"] >= 4 * 19
    assert gained["many"] <= gained["few"] + 3 * 20  # and what runs at the beginning
    sim.run()
    sim.check_drained()
    for name, choice in sim.outputs:
        sim.check_output(name, choice)
