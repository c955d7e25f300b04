"""The number of engines: what holds for every observation, the faults of other planners, and a day with a spike."""

import itertools
import math
import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.scale import BUCKET, DAY, Observation, ScaleDecision, ScalePolicy, ScaleState, decide, forecast

CAPACITY = 1000.0
POLICY = ScalePolicy(least=1, most=20, window=300.0, forecast=False)


def seen(at: float, ready: int, load: float | None, **more: object) -> Observation:
    return Observation(at=at, ready=ready, load=load, **{"capacity": CAPACITY, "wait": 0.0, "kv_usage": 0.0, **more})


def run(
    loads, policy: ScalePolicy = POLICY, ready: int = 1, every: float = 10.0, **more: object
) -> list[ScaleDecision]:
    """Decide again and again; what is wanted is there at once."""
    state, decisions = ScaleState(), []
    for number, load in enumerate(loads):
        decision = decide(seen(number * every, ready, load, **more), state, policy)
        decisions.append(decision)
        state, ready = decision.state, decision.wanted
    return decisions


# -- what always holds ------------------------------------------------------------------------------------------------

observations = st.builds(
    Observation,
    at=st.floats(0, 1e7),
    ready=st.integers(0, 50),
    held=st.integers(0, 5),
    load=st.none() | st.floats(0, 1e6),
    capacity=st.none() | st.floats(1, 1e5),
    kv_usage=st.none() | st.floats(0, 1),
    wait=st.none() | st.floats(0, 1000),
    start_seconds=st.floats(0, 600),
)


@given(st.lists(observations, max_size=30), st.integers(0, 3), st.integers(3, 12), st.floats(1, 50))
def test_the_limits_hold_whatever_is_seen(many, least, most, budget) -> None:
    policy = ScalePolicy(least=least, most=most, budget=budget, price=1.0)
    state = ScaleState()
    for each in sorted(many, key=lambda one: one.at):
        decision = decide(each, state, policy)
        state = decision.state
        assert decision.wanted <= min(most, budget)
        assert decision.wanted >= min(least, math.floor(budget))
        assert decision.reason
        assert len(state.needs) <= 102 and len(state.buckets) <= 2400, "the state is bounded"


@given(st.floats(0, 1e5), st.floats(0, 1e5), st.integers(1, 20))
def test_more_load_never_means_fewer_engines(load, more, ready) -> None:
    policy = ScalePolicy(most=1000, forecast=False)
    few = decide(seen(0.0, ready, load), ScaleState(), policy).wanted
    many = decide(seen(0.0, ready, load + more), ScaleState(), policy).wanted
    assert many >= few


def test_noise_does_not_make_it_flap() -> None:
    drawn = random.Random(2)
    decisions = run([3200 * drawn.uniform(0.9, 1.1) for _ in range(400)], ready=4)
    wanted = [decision.wanted for decision in decisions[40:]]
    assert max(wanted) - min(wanted) <= 1
    assert sum(a != b for a, b in itertools.pairwise(wanted)) <= 2


# -- the faults of other planners -------------------------------------------------------------------------------------


def test_it_scales_down_at_zero_traffic() -> None:
    """Rates of zero are not missing data."""
    assert run([5000.0] * 5 + [0.0] * 60)[-1].wanted == 1


def test_the_last_engine_does_not_oscillate() -> None:
    """The load of two engines at 0.45 each is 0.9 on one, which is too much: two stay."""
    decisions = run([900.0] * 200, ready=2)
    assert {decision.wanted for decision in decisions} == {2}
    assert {decision.wanted for decision in run([700.0] * 200, ready=2)[40:]} == {1}


def test_full_memory_is_shared_by_those_that_stay() -> None:
    """KV use is a share of what the engines that serve have: it rises when one leaves."""
    state, ready, wanted = ScaleState(), 4, []
    for number in range(200):
        decision = decide(seen(number * 10.0, ready, 500.0, kv_usage=3.4 / ready), state, POLICY)
        state, ready = decision.state, decision.wanted
        wanted.append(ready)
    assert set(wanted[1:]) == {5}


def test_a_long_queue_counts_although_the_rate_does_not() -> None:
    """A burst waits while tokens a second, which are what the engines manage, look right."""
    decision = decide(seen(0.0, 4, 3000.0, wait=5.0), ScaleState(), POLICY)
    assert decision.wanted == 8 and "wait for 5.0 s" in decision.reason


def test_missing_data_holds() -> None:
    decisions = run([5000.0] * 5 + [None] * 500)
    assert {decision.wanted for decision in decisions[5:]} == {decisions[4].wanted}
    assert "hold" in decisions[-1].reason
    first = decide(seen(0.0, 0, None), ScaleState(), POLICY)
    assert first.wanted == POLICY.least, "an outage at the start does not go below the minimum"
    assert decide(seen(0.0, 3, 100.0, capacity=None), ScaleState(wanted=3), POLICY).wanted == 3


def test_the_budget_is_the_last_limit() -> None:
    policy = ScalePolicy(least=3, most=20, price=2.5, budget=9.0, forecast=False)
    decision = decide(seen(0.0, 1, 9000.0), ScaleState(), policy)
    assert decision.wanted == 3 and decision.reason.endswith("the budget allows 3")
    poor = ScalePolicy(least=3, most=20, price=2.5, budget=6.0, standby=2, forecast=False)
    assert decide(seen(0.0, 1, 100.0), ScaleState(), poor).wanted == 2


def test_there_is_one_source_of_the_number() -> None:
    """Whoever else starts or ends engines changes nothing that is wanted: the load decides, and not the last number."""
    for ready in (1, 2, 5, 12):
        assert run([2300.0] * 3, ready=ready)[0].wanted == 3
        decision = decide(seen(0.0, ready, 2300.0), ScaleState(wanted=ready), POLICY)
        assert decision.wanted == 3


def test_an_engine_that_never_gets_ready_blocks_nothing() -> None:
    """Decisions go on while the engines that serve stay the same: up for more load, and down later."""
    state = decide(seen(0.0, 1, 1500.0), ScaleState(), POLICY).state
    stuck = decide(seen(600.0, 1, 5000.0), state, POLICY)
    assert stuck.wanted == 7
    later = stuck
    for number in range(40):
        later = decide(seen(610.0 + 10 * number, 1, 200.0), later.state, POLICY)
    assert later.wanted == 1


def test_a_target_that_cannot_be_met_does_not_pin_engines() -> None:
    """Requests wait for a reason that is not the load, such as one step that is longer than the target."""
    decisions = run([300.0] * 200, ready=8, wait=9.0)
    assert decisions[-1].wanted == 1


def test_a_waiting_request_wakes_a_fleet_of_zero() -> None:
    policy = ScalePolicy(least=0, idle=100.0, window=50.0, forecast=False)
    decisions = run([500.0] * 3 + [0.0] * 40, policy)
    assert decisions[8].wanted == 1 and decisions[-1].wanted == 0
    woken = decide(seen(1000.0, 0, 0.0, held=2), decisions[-1].state, policy)
    assert woken.wanted == 1 and woken.reason == "a request waits"
    unknown = decide(seen(1000.0, 0, None, held=2), decisions[-1].state, policy)
    assert unknown.wanted == 1


# -- a day with a spike -----------------------------------------------------------------------------------------------


def traffic(at: float) -> float:
    """Tokens a second: a day's wave, and a spike of four times as much at the same hour of each day."""
    hour = at % DAY / 3600
    wave = 2500 - 1500 * math.cos(2 * math.pi * hour / 24)
    return wave * (4.0 if 10.0 <= hour < 10.5 else 1.0)


def test_a_forecast_has_the_engines_ready_when_the_spike_comes() -> None:
    for start in (90.0, 180.0):
        late, hours, oracle = simulate(ScalePolicy(most=60), start)
        assert late <= 0.001, f"{late:.2%} of the tokens came when too few engines were ready"
        assert hours <= 1.15 * oracle
        blind, *_ = simulate(ScalePolicy(most=60, forecast=False), start)
        assert blind > late


def simulate(policy: ScalePolicy, start: float, every: float = 15.0) -> tuple[float, float, float]:
    """Two days, of which the second counts. Returns the share of tokens beyond the capacity that was ready, the hours
    of engines, and those of an oracle that starts each engine exactly in time."""
    drawn = random.Random(3)
    state, started = ScaleState(), [-math.inf] * 4
    beyond = total = hours = oracle = 0.0
    for tick in range(int(2 * DAY / every)):
        at = tick * every
        load = traffic(at) * drawn.uniform(0.95, 1.05)
        ready = sum(at - since >= start for since in started)
        use = load / max(ready * CAPACITY, 1.0)
        decision = decide(seen(at, ready, load, start_seconds=start, wait=5.0 if use > 1 else 0.0), state, policy)
        state = decision.state
        started.sort()
        del started[decision.wanted :]  # the newest end first: they may not be ready yet
        started += [at] * (decision.wanted - len(started))
        if at >= DAY:
            total += load
            beyond += max(load - ready * CAPACITY, 0.0)
            hours += len(started) * every / 3600
            needed = max(traffic(at + ahead) for ahead in (0.0, start))
            oracle += math.ceil(needed / (CAPACITY * policy.target_use)) * every / 3600
    return beyond / total, hours, oracle


def test_a_forecast_sees_a_spike_when_an_engine_must_start_for_it() -> None:
    """Not minutes earlier: an engine that waits for the spike costs as much as one that works."""
    begins = 10 * 3600.0
    record = dict.fromkeys(range(int(DAY // BUCKET)), 100.0) | {int(begins // BUCKET): 900.0}
    early = begins - 180.0 - 2 * BUCKET
    assert forecast(record, DAY + early - 1.0, DAY + early + 179.0) == 100.0
    assert forecast(record, DAY + early + BUCKET, DAY + early + BUCKET + 180.0) == 900.0


def test_a_forecast_needs_a_record() -> None:
    assert forecast({}, 1000.0, 2000.0) == 0.0
    assert decide(seen(0.0, 1, 100.0), ScaleState(), ScalePolicy()).wanted == 1


def test_engines_leave_sooner_where_a_record_says_that_they_are_not_needed_again() -> None:
    left = {}
    for name, record in (("blind", {}), ("forecast", dict.fromkeys(range(int(DAY // BUCKET)), 100.0))):
        state = ScaleState(wanted=4, capacity=CAPACITY, buckets=record)
        for after in range(0, 400, 10):
            state = decide(seen(DAY + after, 4, 3000.0 if not after else 100.0), state, ScalePolicy()).state
            if state.wanted == 1:
                left[name] = after
                break
    assert left == {"blind": 300, "forecast": 90}


def test_engines_leave_at_once_when_the_load_falls_as_the_record_does() -> None:
    """A fall that the day before had is not noise, so nothing is held for a window."""
    begins, ends = 10 * 3600.0, 10 * 3600.0 + 600.0
    spike = range(int(begins // BUCKET), int(ends // BUCKET))
    record = dict.fromkeys(range(int(DAY // BUCKET)), 500.0) | dict.fromkeys(spike, 3000.0)

    def engines(last: float) -> list[int]:
        """What is wanted every ten seconds from the record's end on, if the load falls `last` seconds later."""
        state, wanted = ScaleState(buckets=record), []
        for after in range(-300, 400, 10):
            load = 3000.0 if after < last else 500.0
            state = decide(seen(DAY + ends + after, 4, load, start_seconds=90.0), state, ScalePolicy()).state
            wanted.append(state.wanted)
        return wanted[30:]

    assert engines(0.0) == [1] * 40
    assert engines(30.0) == [4] * 3 + [1] * 37
    assert engines(120.0) == [4] * (12 + 8) + [1] * 20, "the window holds what the record does not explain"


def test_noise_of_the_record_does_not_make_it_flap() -> None:
    drawn = random.Random(4)
    record = {each: 2400 * drawn.uniform(0.9, 1.1) for each in range(int(DAY // BUCKET))}
    state, wanted = ScaleState(buckets=record), []
    for number in range(400):
        load = 2400 * drawn.uniform(0.9, 1.1)
        state = decide(seen(DAY + number * 10.0, 4, load), state, ScalePolicy()).state
        wanted.append(state.wanted)
    assert set(wanted[12:]) <= {3, 4}
    assert sum(a != b for a, b in itertools.pairwise(wanted)) <= 4
