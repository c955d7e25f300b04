"""When an engine counts as stopped."""

import pytest

from penstock.engine.pace import LEAST, Pace
from penstock.messages import EngineStats


def ticks(*heard: int | None, step_deadline: float = 4.0) -> float:
    """The most that ticks a second apart give."""
    pace = Pace(512, step_deadline)
    return max(pace.tick(count, EngineStats()) for count in heard)


def test_progress_is_an_event_between_two_ticks_while_one_is_due() -> None:
    assert ticks(*[None] * 20) == 0
    assert ticks(*range(20)) == 0
    assert ticks(5, 5, 6, 6, 6, 7) == 0
    assert ticks(5, 5, 5, 5, None, 5, 5, 5, 5) == 0
    assert ticks(*[5] * 5) == 4.0


def after(*steps: tuple[int, int, float], most_tokens: int = 512) -> float:
    """The deadline after so many steps, tokens and seconds between ticks."""
    pace, stats = Pace(most_tokens, 120.0), EngineStats()
    assert pace.deadline == 120.0, "nothing has been measured"
    for count, tokens, seconds in steps:
        stats = EngineStats(
            steps=stats.steps + count,
            computed_tokens=stats.computed_tokens + tokens,
            step_seconds=stats.step_seconds + seconds,
        )
        pace.tick(None, stats)
    return pace.deadline


@pytest.mark.parametrize(
    ("steps", "deadline"),
    [
        ([(100, 100, 0.5)], 4 * 512 * 0.005),  # decode steps only: a prompt may take this long
        ([(100, 100, 0.5), (2, 1024, 0.4)], LEAST),  # and less once one has been measured
        ([(5, 5, 1.0), (1, 512, 8.0)], 80.0),  # ten times the longest step
        ([(5, 5, 1.0), (1, 512, 8.0), *[(50, 512, 0.5)] * 34], 10 * 8 * 0.98**34),  # which fades
        ([(5, 5, 4.0)], 120.0),  # never more than step_deadline
    ],
)
def test_the_deadline_follows_from_the_steps(steps: list[tuple[int, int, float]], deadline: float) -> None:
    assert after(*steps) == pytest.approx(deadline)


def test_a_new_engine_does_not_count_backwards() -> None:
    pace = Pace(512, 120.0)
    pace.tick(None, EngineStats(steps=100, computed_tokens=100, step_seconds=0.5))
    pace.tick(None, EngineStats(steps=0, computed_tokens=0, step_seconds=0.0))
    assert pace.deadline == pytest.approx(4 * 512 * 0.005)
