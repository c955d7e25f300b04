"""The same events give the same plans."""

import io
import random

import msgspec
import pytest

from penstock.schedule import Event, EventFile, ReplayMismatch, read_events, replay
from penstock.schedule.log import Added, Submitted
from tests.schedule.simulated import Simulation, request, simulation


def busy(sim: Simulation, seed: int) -> None:
    """Requests that come, fork, finish, fail and are aborted in a pool too small for them."""
    rng = random.Random(seed)
    for i in range(12):
        sim.add(request(f"r{i}", rng.randint(1, 20), rng.randint(1, 20), n=rng.randint(1, 3), logit_bias={3: 0.5}))
        if rng.random() < 0.5:
            sim.step()
        if rng.random() < 0.2:
            sim.abort(f"r{rng.randint(0, i)}")
        if rng.random() < 0.2:
            sim.finish(f"r{rng.randint(0, i)}", 0, keep=0)
        if rng.random() < 0.1:
            sim.scheduler.reset_prefix_cache()
        if rng.random() < 0.2 and sim.outstanding:
            sim.lose_memory()
    sim.run()


@pytest.mark.parametrize("seed", range(4))
def test_a_replay_gives_identical_plans(seed: int) -> None:
    file = io.BytesIO()
    sim = simulation(blocks=17, windows=(0, 8), depth=1 + seed, log=EventFile(file, print))
    busy(sim, seed)
    assert len(sim.plans) > 20
    assert replay(read_events(file.getvalue().splitlines())) == sim.plans


def test_a_full_disk_ends_the_log_and_nothing_else() -> None:
    failures: list[OSError] = []
    with open("/dev/full", "wb", buffering=0) as file:
        sim = simulation(log=EventFile(file, failures.append))
        sim.add(request("a"))
        sim.run()
    assert [failure.strerror for failure in failures] == ["No space left on device"]
    assert sim.plans


def test_a_list_is_a_log() -> None:
    log: list[Event] = []
    sim = simulation(log=log)
    sim.add(request("a"))
    sim.run()
    assert replay(log) == sim.plans


def test_refused_requests_are_not_logged() -> None:
    log: list[Event] = []
    sim = simulation(log=log)
    with pytest.raises(ValueError):
        sim.add(request("a", 1000))
    assert len(log) == 1


def test_a_log_without_its_beginning_is_refused() -> None:
    log: list[Event] = []
    sim = simulation(log=log)
    sim.add(request("a"))
    with pytest.raises(ValueError, match="begins with Added"):
        replay(log[1:])


def test_another_plan_is_found_out() -> None:
    log: list[Event] = []
    sim = simulation(log=log)
    busy(sim, 0)
    last = max(i for i, event in enumerate(log) if isinstance(event, Submitted))
    log[last] = msgspec.structs.replace(log[last], digest="0" * 32)
    with pytest.raises(ReplayMismatch, match=f"plan {log[last].plan_id} differs"):
        replay(log)


def test_an_event_that_was_removed_or_changed_is_found_out() -> None:
    log: list[Event] = []
    sim = simulation(log=log)
    busy(sim, 0)
    for index in [i for i, event in enumerate(log) if isinstance(event, Added)]:
        with pytest.raises(ReplayMismatch):
            replay(log[:index] + log[index + 1 :])
    (index, *_) = [i for i, event in enumerate(log) if isinstance(event, Submitted)]
    with pytest.raises(ReplayMismatch, match="goes on with"):
        replay(log[:index] + log[index + 1 :])


def test_a_line_that_is_no_event_is_named() -> None:
    with pytest.raises(ValueError, match="line 1 of the event log is no event"):
        list(read_events([b"{}\n"]))
