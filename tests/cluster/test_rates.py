"""The measurement of an engine's steps from its counters."""

import random

import pytest

from penstock.cluster.rates import StepRates
from penstock.messages import EngineStats

STEP, ROW, PREFILL = 0.011, 0.0004, 0.0002


def after(stats: EngineStats, steps: int, rows: int, prompt: int, seconds: float) -> EngineStats:
    return EngineStats(
        steps=stats.steps + steps,
        decode_tokens=stats.decode_tokens + rows,
        computed_tokens=stats.computed_tokens + rows + prompt,
        step_seconds=stats.step_seconds + seconds,
    )


def test_it_finds_the_parts_of_a_step() -> None:
    rates, stats, drawn = StepRates(), EngineStats(), random.Random(1)
    rates.observe(stats)
    for _ in range(200):
        steps, rows, prompt = drawn.randint(1, 5), drawn.randint(0, 30), drawn.choice([0, 0, 100, 700])
        noise = drawn.uniform(0.97, 1.03)
        stats = after(stats, steps, rows, prompt, noise * (STEP * steps + ROW * rows + PREFILL * prompt))
        rates.observe(stats)
    assert rates.step_seconds == pytest.approx(STEP, rel=0.1)
    assert rates.row_seconds == pytest.approx(ROW, rel=0.2)
    assert rates.prefill_seconds == pytest.approx(PREFILL, rel=0.1)
    assert rates.longest > STEP


def test_what_is_not_observed_is_not_negative_and_stays() -> None:
    rates, stats = StepRates(), EngineStats()
    for _ in range(30):
        stats = after(stats, 1, 0, 400, STEP + 400 * PREFILL)
        rates.observe(stats)
    before = rates.prefill_seconds
    assert before > 0 and rates.row_seconds == 0.0
    for _ in range(20):
        stats = after(stats, 2, 16, 0, 2 * STEP + 16 * ROW)
        rates.observe(stats)
    assert rates.prefill_seconds == pytest.approx(before, rel=0.5)
    assert min(rates.step_seconds, rates.row_seconds) >= 0.0


def test_another_engine_begins_anew() -> None:
    rates = StepRates()
    rates.observe(EngineStats(steps=50, step_seconds=5.0, computed_tokens=50, decode_tokens=50))
    known = rates.step_seconds
    rates.observe(EngineStats(steps=1, step_seconds=0.01, computed_tokens=1, decode_tokens=1))
    assert rates.step_seconds == known


def test_the_first_measurements_count_little() -> None:
    rates, stats = StepRates(), EngineStats()
    trusted = [rates.trust]
    for _ in range(200):
        stats = after(stats, 1, 0, 400, STEP + 400 * PREFILL)
        rates.observe(stats)
        trusted.append(rates.trust)
    assert trusted[0] == 0.0 and trusted == sorted(trusted)
    assert trusted[5] < 0.1 and 0.75 < trusted[-1] < 1.0
