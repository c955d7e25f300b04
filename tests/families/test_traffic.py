"""Bytes that ranks hand to each other. That they are those in fact moved is tested with the mesh."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import RankPlace, Split
from penstock.families.traffic import StepTraffic, link_bytes, step_traffic
from tests.families.divisible import CONFIGS, spec_of

HIDDEN, VOCAB = 64, 307  # of every model there; 5 layers


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (Split(), [StepTraffic()]),
        # The embedding and 4 layers' sums of three tokens, the last layer's of two.
        (
            Split(2),
            [StepTraffic(sum=(9 * 3 + 2 * 2) * 128), StepTraffic(sum=(9 * 3 + 2 * 2) * 128, gather=2 * 153 * 4)],
        ),
        (Split(1, 2), [StepTraffic(send=3 * HIDDEN * 2), StepTraffic()]),
        (
            Split(2, 2),  # 3 layers and the embedding, then 2
            [StepTraffic(7 * 384, 0, 384)] * 2 + [StepTraffic(2 * 384 + 512), StepTraffic(2 * 384 + 512, 2 * 153 * 4)],
        ),
    ],
    ids=str,
)
def test_a_step_of_three_tokens_that_samples_two(split: Split, expected: list[StepTraffic]) -> None:
    assert [step_traffic(spec_of("llama"), place, 3, 2, 2) for place in split.places] == expected


def test_links_carry_parts_to_and_from_every_other_rank_and_states_to_the_next_stage() -> None:
    spec = spec_of("llama")
    sums = step_traffic(spec, RankPlace(Split(4), 0), 3, 2, 4).sum
    assert link_bytes(spec, Split(4), 3, 2, 4) == 3 * sums + 2 * (VOCAB - 77) * 4
    assert link_bytes(spec, Split(1, 3), 3, 2, 4) == 2 * 3 * HIDDEN * 4
    assert link_bytes(spec, Split(2, 2), 3, 2, 4) == ((9 + 1) * 3 + 2 * 2) * HIDDEN * 4 + 2 * 153 * 4
    assert link_bytes(spec, Split(), 3, 2, 4) == 0


@given(
    family=st.sampled_from(sorted(CONFIGS)),
    split=st.builds(Split, st.sampled_from([1, 2, 4]), st.integers(1, 5)),
    tokens=st.integers(0, 100),
    sampled=st.integers(0, 100),
)
@settings(max_examples=30, deadline=None)
def test_bytes_grow_with_tokens_and_samples_alone(family: str, split: Split, tokens: int, sampled: int) -> None:
    spec = spec_of(family)
    for place in split.places:
        step, token, sample = (
            step_traffic(spec, place, *counts, 2).total for counts in ((tokens, sampled), (1, 0), (0, 1))
        )
        assert step == tokens * token + sampled * sample
    ranks = [step_traffic(spec, place, tokens, sampled, 2) for place in split.places]
    assert sum(rank.gather for rank in ranks) == sampled * 4 * (VOCAB - (-(-VOCAB // split.tensor))) * (
        split.tensor > 1
    )
