"""Requests that cannot make their deadline are dropped before anything is computed for them, and no others are."""

import random

import pytest

from penstock.schedule import Event, replay
from penstock.schedule.late import makes_late
from penstock.schedule.log import Dropped
from penstock.schedule.step_model import StepSize
from tests.schedule.invariants import check_scheduler
from tests.schedule.simulated import Simulation, request, simulation

PROMPT, OUTPUT = 24, 8


def overloaded(
    log: list[Event] | None = None, *, patience: float | None, load: float, drops: bool = True, tokens: int = 32
) -> tuple[Simulation, float]:
    """A simulation to which requests came at `load` times what it can serve, each with `patience` for its first token.

    Also returns how many seconds they came. A step has at most `tokens`. It takes 10 ms, and 10 ms for every 16 tokens
    of prompts.
    """
    sim = simulation(max_num_seqs=8, max_num_batched_tokens=tokens, blocks=200, max_model_len=64, log=log)
    sim.step_seconds = lambda plan: 0.01 + 0.01 * sum(work.count for work in plan.work if work.count > 1) / 16
    rng = random.Random(3)
    rate, arrival, number = load * 33.0, 1.0, 0
    sim.now = 1.0
    while number < 300:
        arrival += rng.expovariate(rate)
        while sim.now < arrival and sim.scheduler.has_work:
            sim.step()
        sim.now = max(sim.now, arrival)
        deadline = arrival + patience if patience and drops else None
        sim.add(request(f"r{number}", PROMPT, OUTPUT, arrival=arrival, first_token_deadline=deadline))
        number += 1
    end = sim.now
    sim.run()
    return sim, end - 1.0


def in_time(sim: Simulation, patience: float) -> int:
    """Requests that had their first token in time."""
    timings = [output.final.timing for output in sim.outputs.values() if output.final is not None]
    return sum(timing.queued + timing.prefill <= patience for timing in timings)


def test_a_late_request_costs_nothing_and_the_others_are_in_time() -> None:
    sim, _ = overloaded(patience=0.5, load=2.0)
    assert len(sim.dropped) > 50
    known = len(sim.requests) - len(sim.dropped)
    assert in_time(sim, 0.5) >= 0.97 * known, "what was computed was late after all"
    computed = sim.scheduler.stats().computed_tokens
    assert computed <= known * (PROMPT + OUTPUT), "tokens were computed for dropped requests"
    assert not sim.scheduler.has_work


def test_goodput_under_twice_the_load() -> None:
    capacity, _ = overloaded(patience=None, load=8.0)
    per_second = len(capacity.requests) / (capacity.now - 1.0)
    goodput = {}
    for drops in (True, False):
        sim, seconds = overloaded(patience=0.5, load=2.0 * per_second / 33.0, drops=drops)
        goodput[drops] = in_time(sim, 0.5) / seconds / per_second
    assert goodput[True] >= 0.9
    assert goodput[False] < 0.3


def test_prompts_beside_it_make_no_request_late() -> None:
    """A step has room for five prompts and takes 85 ms with them: longer than a request waits."""
    capacity, _ = overloaded(patience=None, load=8.0, tokens=128)
    per_second = len(capacity.requests) / (capacity.now - 1.0)
    sim, seconds = overloaded(patience=0.06, load=2.0 * per_second / 33.0, tokens=128)
    assert in_time(sim, 0.06) >= 0.95 * (len(sim.requests) - len(sim.dropped))
    assert in_time(sim, 0.06) / seconds >= 0.93 * per_second


def test_nothing_is_dropped_without_load() -> None:
    sim, _ = overloaded(patience=0.5, load=0.6)
    assert sim.dropped == []
    assert in_time(sim, 0.5) == len(sim.requests)


def test_a_request_without_a_deadline_is_never_dropped() -> None:
    sim, _ = overloaded(patience=None, load=3.0)
    assert sim.dropped == []


def test_a_cached_prompt_is_not_taken_for_a_long_one() -> None:
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=32, blocks=200, max_model_len=256)
    sim.step_seconds = lambda plan: 0.01 * sum(work.count for work in plan.work)
    shared = list(range(41, 49)) * 20
    for number in range(4):
        sim.add(request(f"warm{number}", [*shared, number], 2, first_token_deadline=sim.now + 1000.0))
        sim.run()
    sim.add(request("cached", [*shared, 9], 2, first_token_deadline=sim.now + 0.5))
    sim.add(request("other", 160, 2, first_token_deadline=sim.now + 0.5))
    sim.run()
    assert sim.dropped == ["other"]
    sim.check_output("cached")


def test_a_prompt_that_joins_with_a_long_prefix_counts_what_it_attends_to() -> None:
    """Ten tokens behind 5,000 that are cached take 50 ms; ten without any take none of it."""

    class Model:
        knows_prompts, spread = True, 1.0

        def seconds(self, size: StepSize) -> float:
            return 0.001 + 1e-6 * size.pairs

    sim = simulation()
    sim.add(request("first", 8, 2, first_token_deadline=0.02))
    step = sim.scheduler._planner.next_step((), 0.0)
    late = [makes_late(step, 10, computed, Model(), 0.0) for computed in (0, 5000)]  # type: ignore[arg-type]
    assert late == [False, True]


@pytest.mark.parametrize(("patience", "dropped"), [(0.2, ["late"]), (1.0, [])])
def test_the_attention_of_a_prompt_ahead_is_counted(patience: float, dropped: list[str]) -> None:
    """800 tokens take 8 ms, and 320 ms for the tokens that they attend to."""
    sim = simulation(max_num_batched_tokens=2048, max_model_len=1024, blocks=1000)
    sim.step_seconds = lambda plan: 0.001 + sum(1e-5 * work.count + 1e-6 * work.count**2 / 2 for work in plan.work)
    for number, length in enumerate((30, 400, 100, 700, 200) * 3):
        sim.add(request(f"teaches{number}", length, 1, deadline=sim.now + 1000.0))
        sim.run()
    sim.add(request("ahead", 800, 2, priority=-100))
    sim.add(request("late", 20, 2, first_token_deadline=sim.now + patience))
    sim.run()
    assert sim.dropped == dropped
    final = sim.outputs["late", 0].final
    assert dropped or (final and final.timing and final.timing.queued + final.timing.prefill < patience)


def test_a_request_with_choices_is_dropped_whole() -> None:
    sim = simulation(max_num_seqs=4, max_num_batched_tokens=32, blocks=200, max_model_len=256)
    sim.step_seconds = lambda plan: 0.01 * sum(work.count for work in plan.work)
    for number in range(4):
        sim.add(request(f"warm{number}", 20, 2, first_token_deadline=sim.now + 1000.0))
        sim.run()
    sim.add(request("late", 160, 4, n=3, deadline=sim.now + 0.5))
    sim.run()
    assert sim.dropped == ["late"]
    assert not sim.scheduler.has_work
    check_scheduler(sim.scheduler)


def test_a_replay_drops_the_same() -> None:
    log: list[Event] = []
    sim, _ = overloaded(log, patience=0.3, load=2.0)
    assert any(isinstance(event, Dropped) for event in log)
    assert replay(log) == sim.plans
