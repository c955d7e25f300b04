"""Nothing waits for ever, whatever priorities and deadlines others send."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.messages import GenerateRequest
from penstock.schedule.policy import PATIENCE, due_order
from tests.schedule.simulated import Simulation, request, simulation

MOST = 3  # the operator's range of priorities


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    arrival = draw(st.floats(0, 100, allow_nan=False))
    deadlines = [
        None if wait is None else arrival + wait
        for wait in draw(st.tuples(*[st.none() | st.floats(-5, 50, allow_nan=False)] * 2))
    ]
    return request(
        "r",
        arrival=arrival,
        priority=draw(st.integers(-MOST, MOST)),
        deadline=deadlines[0],
        first_token_deadline=deadlines[1],
    )


@settings(max_examples=500)
@given(requests(), requests())
def test_a_request_is_never_behind_one_that_comes_much_later(a: GenerateRequest, b: GenerateRequest) -> None:
    bound = PATIENCE + 2 * MOST
    if b.arrival - a.arrival > bound + 1e-9:
        assert due_order(a, a.arrival) < due_order(b, b.arrival)
    if a.deadline == a.first_token_deadline == b.deadline == b.first_token_deadline is None:
        gap = b.arrival - a.arrival
        if gap > 2 * MOST + 1e-9:  # without deadlines, priorities alone can put a later one first
            assert due_order(a, a.arrival) < due_order(b, b.arrival)


@pytest.mark.parametrize("blocks", [65, 12])  # 12: too few, so that running requests are preempted
def test_twelve_that_come_first_do_not_starve_the_thirteenth(blocks: int) -> None:
    sim = simulation(max_num_seqs=2, blocks=blocks)
    sim.token_seconds = 0.01
    sent = iter(range(10_000))
    sim.add(request("last", 7, 25, priority=MOST))
    hurried: set[str] = set()
    while sim.outputs["last", 0].finish_reason is None:
        assert sim.now < 2 * MOST + 5, "starved"
        for name in [name for name in hurried if sim.outputs[name, 0].finish_reason]:
            hurried.remove(name)
        while len(hurried) < 12:
            name = f"first{next(sent)}"
            sim.add(request(name, 7, 25, priority=-MOST))
            hurried.add(name)
        sim.step()
    assert sim.now > 2 * MOST - 1, "priorities have no effect"
    final = sim.outputs["last", 0].final
    assert final is not None and final.timing is not None
    assert final.timing.preemptions <= 1  # what comes later is behind it for good, so it is not preempted in turn
    sim.check_output("last")


def test_others_come_between_the_prompts_of_one_request() -> None:
    """Two clients send 32 prompts each. A third one that comes then does not wait for all of them."""
    sim = simulation(max_num_seqs=4, blocks=65)
    sim.token_seconds = 0.01
    for i in range(64):
        sim.add(request(f"many{i}", 7, 5, behind=i // 2 * 0.25))
    sim.step()
    sim.add(request("one", 7, 5))
    while sim.outputs["one", 0].finish_reason is None:
        sim.step()
    ended = [name for name in sim.requests if sim.outputs[name, 0].finish_reason]
    assert len(ended) < 12
    while any(sim.outputs[name, 0].finish_reason is None for name in sim.requests):
        sim.step()


def test_equal_requests_keep_the_order_in_which_they_came() -> None:
    places = [due_order(request("r", arrival=arrival), arrival) for arrival in (1.0, 2.0, 2.0, 3.0)]
    assert places == sorted(places)


def test_a_deadline_that_has_passed_does_not_move_a_request_before_its_arrival() -> None:
    late = request("r", arrival=50.0, deadline=1.0)
    assert due_order(late, 50.0)[0] == 50.0
    assert not math.isinf(due_order(request("r", arrival=50.0), 50.0)[0])


def order_of_starts(sim: Simulation) -> list[str]:
    names = {}
    for name in sim.requests:
        timing = sim.outputs[name, 0].final.timing  # type: ignore[union-attr]
        names[name] = sim.requests[name].arrival + timing.queued
    return sorted(names, key=names.__getitem__)


def test_the_one_whose_deadline_is_first_starts_first() -> None:
    sim = simulation(max_num_seqs=1)
    sim.now = 1.0
    sim.add(request("runs", 4, 8, arrival=1.0))
    sim.step()
    sim.add(request("patient", 4, 2, arrival=1.0))
    sim.add(request("relaxed", 4, 2, arrival=1.0, first_token_deadline=9.0))
    sim.add(request("hurried", 4, 2, arrival=1.0, first_token_deadline=3.0))
    sim.run()
    assert order_of_starts(sim) == ["runs", "hurried", "relaxed", "patient"]
