"""How many drafts a step may have depends on measured times; what was never measured is tried with care."""

from penstock.schedule.drafts.cost import FEW, STALE, StepTimes, draft_counts

PLAIN = 0.004


def chosen(times: StepTimes, probability: float, step: int, room: float = 1.0) -> int:
    """Drafts of a lone sequence that has 31 at hand."""
    plain = times.plain(1, step)
    assert plain is not None
    seconds = times.with_drafts(1, plain, 31, step)
    return draft_counts([probability], [31], [room], 1.0, 1, seconds)[0]


def measured(**seconds: float) -> StepTimes:
    """`_3=0.005`: a step with 3 drafts took that long."""
    times = StepTimes()
    times.note(1, 0, PLAIN, 1)
    for drafts, time in seconds.items():
        times.note(1, int(drafts[1:]), time, 1)
    return times


def test_without_a_plain_step_there_is_nothing_to_compare_with() -> None:
    assert StepTimes().plain(1, 1) is None
    assert measured().plain(1, 1) == PLAIN
    assert measured().plain(1, 2 + STALE) is None


def test_the_first_steps_with_drafts_have_few() -> None:
    """Nobody knows yet what drafts cost here, however sure they are."""
    assert chosen(measured(), 0.99, 1) == FEW
    assert chosen(measured(_4=PLAIN), 0.99, 1) == 8
    assert chosen(measured(_4=PLAIN, _8=PLAIN), 0.99, 1) == 16
    assert chosen(measured(_16=PLAIN), 0.99, 1) > 16


def test_drafts_that_were_measured_to_cost_too_much_are_not_tried_again() -> None:
    assert chosen(measured(_4=6 * PLAIN), 0.99, 1) == 0
    assert chosen(measured(_4=6 * PLAIN), 0.99, 1 + STALE) == 0
    assert chosen(measured(_4=1.5 * PLAIN), 0.1, 1) == 0
    assert chosen(measured(_4=1.5 * PLAIN), 0.9, 1) >= 4


def test_fewer_drafts_where_they_are_less_sure() -> None:
    """A draft costs 15% of a plain step."""
    times = measured(_1=1.15 * PLAIN, _31=(1 + 31 * 0.15) * PLAIN)
    counts = [chosen(times, probability, 1) for probability in (0.1, 0.5, 0.8, 0.95, 0.99)]
    assert counts == sorted(counts)
    assert counts[0] == 0 and 1 <= counts[1] <= 2 and counts[-1] > 20


def test_a_sequence_that_is_behind_gets_no_drafts_that_may_take_it_further() -> None:
    """`room` is how long the step may take for it without drafts: a plain step and what it has saved."""
    times = measured(_4=3 * PLAIN, _8=4 * PLAIN)
    assert chosen(times, 0.9, 1, room=PLAIN) > 0
    assert chosen(times, 0.9, 1, room=-20 * PLAIN) == 0


def test_a_batch_may_try_a_draft_for_each_sequence() -> None:
    """With fewer, those without one would wait for the others."""
    times = StepTimes()
    times.note(8, 0, PLAIN, 1)
    assert len(times.with_drafts(8, PLAIN, 32, 1)) == 1 + 8
