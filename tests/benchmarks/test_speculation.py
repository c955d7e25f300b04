"""What benchmarks/speculation.py makes of its runs."""

import pytest
from speculation import Run, summary


def turn(off: float, control: float, on: float) -> list[Run]:
    """A run of each engine, with these rates of decoding."""
    runs = [Run([[1, 2, 3, 4]], rate / 2, rate, 0, 0, 0, 4) for rate in (off, control)]
    return [*runs, Run([[1, 2, 3, 4]], on / 2, on, 1, 4, 2, 2)]


def test_a_case_is_slower_only_if_its_interval_says_so() -> None:
    noisy = [turn(100, 98, 85 + 4 * i) for i in range(10)]  # 0.85 to 1.21
    steady = [turn(100, 101, 93 + 0.1 * i) for i in range(10)]
    assert not summary("prose", 1, noisy)["slower"]
    found = summary("prose", 1, steady)
    assert found["slower"] and found["decode_ratio"] == pytest.approx(0.9345, abs=1e-3)
    assert found["decode_ratio_interval"] == pytest.approx([0.931, 0.938], abs=1e-3) and found["coverage"] >= 0.95
    assert found["control"] == 1.01 and found["control_interval"] == [1.01, 1.01]


def test_figures_of_drafts_are_means_over_steps_with_drafts() -> None:
    found = summary("copy", 1, [turn(100, 100, 200)] * 6)
    assert (found["drafted_per_step"], found["accepted_per_step"], found["acceptance"]) == (4, 2, 0.5)
    assert found["tokens_per_step"] == 2 and found["ratio"] == found["decode_ratio"] == 2
