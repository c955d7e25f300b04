import random
import statistics
from itertools import pairwise

import pytest

from penstock.bench.timeline import Slo, Timeline, summarise
from penstock.bench.workload import Case, LengthRange, arrivals, fixed, mixed, parse_cases, percentile


def test_cases_are_parsed() -> None:
    assert parse_cases("1x256/64, 32x256/128") == [Case(1, 256, 64), Case(32, 256, 128)]
    assert str(Case(8, 256, 64)) == "8x256/64"


@pytest.mark.parametrize("text", ["", "8x256", "8x256/", "0x1/1", "8x-1/2", "8×256/64", "8x256/64;"])
def test_a_wrong_case_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="NxIN/OUT") as error:
        parse_cases("1x2/3," + text)
    assert repr(text.strip()) in str(error.value)


def test_a_case_is_a_function_of_its_seed() -> None:
    case = Case(3, 20, 5)
    items = fixed(case, 1000, seed=1)
    assert items == fixed(case, 1000, seed=1) != fixed(case, 1000, seed=2)
    assert [len(item.prompt_ids) for item in items] == [20] * 3
    assert len({item.prompt_ids for item in items}) == 3
    assert all(0 <= token < 1000 for item in items for token in item.prompt_ids)


def test_lengths_and_prefix_of_a_mix() -> None:
    items = mixed(200, LengthRange(10, 30), LengthRange(5, 5), 500, shared_prefix=64, seed=3)
    assert len({item.prompt_ids[:64] for item in items}) == 1
    lengths = [len(item.prompt_ids) - 64 for item in items]
    assert min(lengths) >= 10 and max(lengths) <= 30 and len(set(lengths)) > 10
    assert {item.output_len for item in items} == {5}


@pytest.mark.parametrize("text", ["0", "5-4", "a", "1-2-3"])
def test_a_wrong_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="LOW-HIGH"):
        LengthRange.parse(text)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gamma_arrivals_have_the_rate_and_the_burstiness_asked_for(burstiness: float, variation: float) -> None:
    times = arrivals(20_000, 50.0, burstiness, random.Random(0))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.05)


def test_infinite_burstiness_gives_equal_gaps() -> None:
    assert arrivals(4, 4.0, float("inf"), random.Random(0)) == [0.0, 0.25, 0.5, 0.75]


def test_without_a_rate_everything_arrives_at_once() -> None:
    assert arrivals(3, None, 1.0, random.Random(0)) == [0.0] * 3


def test_percentile_is_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.01) == 7.0


def test_a_timeline_becomes_ttft_tpot_itl_and_goodput() -> None:
    quick = Timeline(10.0, [(10.5, 1), (10.6, 1), (10.9, 2)])
    slow = Timeline(10.0, [(13.0, 1), (14.0, 1)])
    failed = Timeline(10.0, error="500")
    assert (quick.ttft, quick.e2e, quick.tokens) == pytest.approx((0.5, 0.9, 4))
    assert quick.tpot == pytest.approx(0.4 / 3)
    assert quick.itls == pytest.approx([0.1, 0.3])
    summary = summarise([quick, slow, failed], 4.0, Slo.parse("ttft=1,tpot=0.2"))
    assert summary["failed"] == 1
    assert summary["output_tokens"] == 6
    assert summary["output_tok_s"] == 1.5
    assert summary["goodput_s"] == 0.25
    assert summary["ttft_ms_p99"] == 3000.0


def test_a_wrong_slo_is_refused() -> None:
    with pytest.raises(ValueError, match="ttft, tpot or e2e"):
        Slo.parse("itl=3")
