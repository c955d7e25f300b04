"""The dynamic batcher: what it batches, when, and what always holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule.batcher import GATHER_SECONDS, Batcher, BatchRules, LevelRules


def queued(rules: BatchRules, *rows: int, group: object = 0, now: float = 0.0) -> Batcher:
    batcher = Batcher(rules)
    for number, count in enumerate(rows):
        assert batcher.add(number, count, group, now) is None
    return batcher


def test_an_idle_instance_takes_what_is_there_at_once() -> None:
    batcher = queued(BatchRules(max_rows=8, max_wait=1.0), 1, 1, 1)
    batch = batcher.plan(0.0)
    assert batch is not None and (batch.requests, batch.rows, batch.reason) == ((0, 1, 2), 3, "idle")
    assert batcher.plan(0.0) is None and batcher.next_due() is None


def test_a_batch_that_never_waited_needs_a_free_instance_and_an_empty_queue() -> None:
    batcher = Batcher(BatchRules(max_rows=4, instances=2))
    assert batcher.free_for(4) and not batcher.free_for(5)
    held = batcher.follow(3)
    batcher.add(1, 1, 0, 0.0)
    assert not batcher.free_for(1)  # the request that waits goes first
    batch = batcher.plan(0.0)
    assert batch is not None and batcher.running == 2 and not batcher.free_for(1)
    assert batcher.apply(held) == [] and batcher.free_for(1) and batcher.apply(batch) == [1]
    assert not Batcher(BatchRules(max_wait=1.0, wait="always")).free_for(1)


def test_rows_are_gathered_for_a_short_time_also_while_nothing_runs() -> None:
    batcher = queued(BatchRules(max_rows=8), 1)
    batcher.gather(3)
    assert batcher.plan(0.0) is None and batcher.next_due() == GATHER_SECONDS
    assert not batcher.due(GATHER_SECONDS / 2) and batcher.due(GATHER_SECONDS)
    batcher.add(8, 2, 0, 0.001)
    batch = batcher.plan(0.001)
    assert batch is not None and (batch.rows, batch.reason) == (3, "idle")
    batcher.add(9, 1, 0, 1.0)
    assert batcher.plan(1.0) is None  # also while a batch has just ended
    batcher.apply(batch)
    assert batcher.plan(1.0) is None and batcher.plan(1.0 + GATHER_SECONDS) is not None
    full = queued(BatchRules(max_rows=2), 1, 1)
    full.gather(3)
    assert full.plan(0.0) is not None
    waits = queued(BatchRules(max_rows=8, max_wait=1.0), 1)
    waits.gather(3)
    assert waits.plan(0.0) is not None  # the rules say how long


def test_a_busy_model_waits_for_a_free_instance_or_for_others() -> None:
    batcher = queued(BatchRules(max_rows=4, max_wait=1.0, instances=2), 1)
    first = batcher.plan(0.0)
    batcher.add(7, 1, 0, 0.1)
    assert first is not None and batcher.plan(0.2) is None and batcher.next_due() == pytest.approx(1.1)
    late = batcher.plan(1.2)
    assert late is not None and (late.requests, late.reason) == ((7,), "waited")


def test_told_to_wait_it_waits_also_while_idle_but_a_full_batch_leaves() -> None:
    rules = BatchRules(max_rows=4, max_wait=1.0, wait="always")
    batcher = queued(rules, 1, 2)
    assert batcher.plan(0.5) is None and batcher.next_due() == 1.0
    batcher.add(9, 1, 0, 0.6)
    batch = batcher.plan(0.6)
    assert batch is not None and (batch.rows, batch.reason) == (4, "full")


def test_preferred_sizes_leave_without_waiting() -> None:
    rules = BatchRules(max_rows=8, max_wait=10.0, wait="always", preferred=(2, 6))
    assert (batch := queued(rules, 2).plan(0.0)) is not None and batch.reason == "preferred"
    assert queued(rules, 1).plan(0.0) is None and queued(rules, 3).plan(0.0) is None
    assert (batch := queued(rules, 7).plan(0.0)) is not None and batch.reason == "full"  # beyond the largest
    batch = queued(rules, 3, 4).plan(0.0)  # together they are beyond the largest
    assert batch is not None and batch.requests == (0,)
    batch = queued(rules, 3, 4).plan(10.0)  # the first has waited long enough
    assert batch is not None and batch.rows == 7
    batch = queued(rules, 2, 1, 3, 1).plan(0.0)
    assert batch is not None and (batch.requests, batch.rows) == ((0, 1, 2), 6)


def test_rows_count_and_shapes_divide() -> None:
    batcher = Batcher(BatchRules(max_rows=4, max_wait=1.0, wait="always"))
    for number, group in enumerate("aab"):
        batcher.add(number, 1, group, 0.0)
    batch = batcher.plan(0.0)
    assert batch is not None and (batch.requests, batch.reason) == ((0, 1), "shapes")
    full = queued(BatchRules(max_rows=4), 3, 2).plan(0.0)
    assert full is not None and (full.requests, full.reason) == ((0,), "full")


def test_static_batching_collects_or_times_out() -> None:
    rules = BatchRules(max_rows=4, max_wait=0.05, mode="static", wait="always")
    batcher = queued(rules, 1, 1)
    assert batcher.plan(0.04) is None
    assert (batch := batcher.plan(0.05)) is not None and batch.reason == "waited" and batch.rows == 2


def test_levels_queue_limits_and_timeouts() -> None:
    levels = (LevelRules(max_queue=1), LevelRules(timeout=1.0), LevelRules(timeout=1.0, late="delay"))
    batcher = Batcher(BatchRules(max_rows=1, levels=levels, default_level=2))
    assert batcher.add(0, 1, 0, 0.0) is None and batcher.add(1, 1, 0, 0.0, level=1) is None
    assert batcher.add(2, 1, 0, 0.0, level=1) == "queue"
    assert batcher.add(3, 1, 0, 0.0, level=3, timeout=0.5) is None and batcher.add(4, 1, 0, 0.1, level=3) is None
    batch = batcher.plan(0.0)
    assert batch is not None and batch.requests == (1,)  # level 1 first
    assert batcher.drop_late(0.6) == [] and batcher.drop_late(1.05) == [0]  # 3 is only delayed
    order = []
    while batch is not None:
        batcher.apply(batch)
        if (batch := batcher.plan(1.06)) is not None:
            order += batch.requests
    assert order == [4, 3]


def test_order_is_kept_on_demand() -> None:
    batcher = queued(BatchRules(max_rows=1, instances=3, keep_order=True), 1, 1, 1)
    one, two, three = (batcher.plan(0.0) for _ in range(3))
    assert one and two and three
    assert batcher.apply(three) == [] and batcher.apply(one) == [0] and batcher.apply(two) == [1, 2]


def test_the_hook_of_tritons_tests_holds_the_first_batch() -> None:
    batcher = queued(BatchRules(max_rows=2, starts_after=2), 1)
    assert batcher.plan(9.0) is None and batcher.next_due() is None
    batcher.add(5, 1, 0, 9.0)
    batch = batcher.plan(9.0)
    assert batch is not None and batch.rows == 2
    batcher.apply(batch)
    batcher.add(6, 1, 0, 9.0)
    assert batcher.plan(9.0) is not None


EVENTS = st.lists(
    st.tuples(st.sampled_from(["add", "cancel", "plan", "apply", "late"]), st.integers(1, 4), st.integers(0, 2)),
    max_size=60,
)
RULES = st.builds(
    BatchRules,
    max_rows=st.integers(4, 8),
    instances=st.integers(1, 3),
    mode=st.sampled_from(["dynamic", "static", "none"]),
    max_wait=st.sampled_from([0.0, 2.0]),
    wait=st.sampled_from(["busy", "always"]),
    preferred=st.sampled_from([(), (3,), (2, 4)]),
    keep_order=st.booleans(),
    levels=st.sampled_from([(LevelRules(),), (LevelRules(3), LevelRules(0, 3.0, "delay"), LevelRules(0, 3.0))]),
)


@given(RULES, EVENTS)
def test_every_request_ends_once_and_limits_hold(rules: BatchRules, events: list[tuple[str, int, int]]) -> None:
    batcher, now = Batcher(rules), 0.0
    rows: dict[int, int] = {}
    groups: dict[int, int] = {}
    ended: list[int] = []
    running = []

    def apply(which: int) -> None:
        ended.extend(batcher.apply(running.pop(which % len(running))))

    for number, (what, count, other) in enumerate(events):
        now += 0.5
        if what == "add":
            if batcher.add(number, count, other, now, level=other + 1) is None:
                rows[number], groups[number] = count, other
        elif what == "cancel" and rows:
            chosen = sorted(rows)[count % len(rows)]
            if batcher.cancel(chosen):
                ended.append(chosen)
        elif what == "late":
            ended += batcher.drop_late(now)
        elif what == "apply" and running:
            apply(count)
        elif what == "plan" and (batch := batcher.plan(now)) is not None:
            running.append(batch)
            assert len(running) <= rules.instances
            assert batch.rows == sum(rows[each] for each in batch.requests) <= rules.max_rows
            assert len({groups[each] for each in batch.requests}) == 1
            assert rules.mode != "none" or len(batch.requests) == 1
        ended += batcher.leaving()
    for _ in range(len(rows) + 1):
        now += 10.0
        ended += batcher.drop_late(now)
        while (batch := batcher.plan(now)) is not None:
            running.append(batch)
        while running:
            apply(0)
        ended += batcher.leaving()
    assert sorted(ended) == sorted(rows) and batcher.waiting == batcher.running == 0


@given(RULES, EVENTS)
def test_a_replay_plans_the_same(rules: BatchRules, events: list[tuple[str, int, int]]) -> None:
    def run() -> list[object]:
        batcher, found = Batcher(rules), []
        for number, (what, count, other) in enumerate(events):
            if what == "add":
                batcher.add(number, count, other, number)
            elif what == "plan":
                found.append(batcher.plan(number))
        return found

    assert run() == run()
