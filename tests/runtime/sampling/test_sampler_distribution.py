"""Samples have the right distribution and are independent across seeds, choices and steps. All seeds are fixed."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.messages import SamplingParams
from tests.runtime.sampling.sampler_oracle import kept
from tests.runtime.sampling.samplers import Sampler

LOGITS = np.array([1.2, 0.9, 0.4, 0.1, -0.3, -0.6, -1.0, -1.1, -2.0, -2.5], np.float32)
DRAWS = 12000


def sequences(steps: int, seeds: int = DRAWS, choice: int = 0, **given: object) -> NDArray[np.int64]:
    """Tokens [steps, seeds] of one choice of requests with seeds 0, 1, 2, ..., always from the same logits."""
    sampler = Sampler(LOGITS.size, seeds)
    for row in range(seeds):
        params = SamplingParams(seed=row, max_tokens=1000, **given)  # type: ignore[arg-type]
        sampler.add(row, params, choice, [], [])
    logits = torch.from_numpy(np.repeat(LOGITS[None], seeds, axis=0))
    return np.array([sampler.sample(logits.clone(), range(seeds)).token_ids for _ in range(steps)])


def expected_shares(**given: object) -> NDArray[np.float64]:
    params = SamplingParams(seed=0, max_tokens=1, **given)  # type: ignore[arg-type]
    keep = kept(LOGITS.astype(np.float64), params)
    weights = np.where(keep, np.exp(LOGITS / np.float64(params.temperature)), 0)
    return weights / weights.sum()


def assert_distributed(counts: NDArray[np.int64], shares: NDArray[np.float64]) -> None:
    """Chi-square: nothing where nothing belongs, and a statistic at most 4 deviations above its mean."""
    assert counts[shares == 0].sum() == 0
    expected = shares[shares > 0] * counts.sum()
    degrees = len(expected) - 1
    statistic = ((counts[shares > 0] - expected) ** 2 / expected).sum()
    assert statistic <= degrees + 4 * np.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.5},
        {"top_k": 4},
        {"top_p": 0.8},
        {"top_p": 0.3},
        {"min_p": 0.2},
        {"top_n_sigma": 1.0},
        {"temperature": 1.5, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 1.5, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_over_seeds(given: dict[str, object]) -> None:
    (tokens,) = sequences(1, 4000, **given)
    assert_distributed(np.bincount(tokens, minlength=LOGITS.size), expected_shares(**given))


def test_over_the_steps_of_one_seed() -> None:
    tokens = sequences(1500, seeds=2)
    for one in tokens.T:
        assert_distributed(np.bincount(one, minlength=LOGITS.size), expected_shares())


def joint(first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.bincount(first * LOGITS.size + second, minlength=LOGITS.size**2)


def test_consecutive_tokens_choices_and_seeds_are_independent() -> None:
    shares = np.outer(expected_shares(), expected_shares()).reshape(-1)
    first, second = sequences(2)
    (sibling,) = sequences(1, choice=1)
    assert_distributed(joint(first, second), shares)
    assert_distributed(joint(first, sibling), shares)
    assert_distributed(joint(first[:-1], first[1:]), shares)


def test_the_same_seed_and_choice_give_the_same_tokens() -> None:
    assert np.array_equal(sequences(3, seeds=50), sequences(3, seeds=50))
    assert not np.array_equal(sequences(3, seeds=50), sequences(3, seeds=50, choice=1))


def test_a_large_flat_vocabulary_is_drawn_evenly() -> None:
    """Where hashes decide alone: 4,000 draws of 20,000 equal tokens, counted in 50 bins and by their low bits."""
    vocab, draws, batch = 20000, 4000, 100
    sampler = Sampler(vocab, batch)
    for row in range(batch):
        sampler.add(row, SamplingParams(seed=row, max_tokens=1000), 0, [], [])
    logits = torch.zeros((batch, vocab))
    tokens = np.concatenate([sampler.sample(logits, range(batch)).token_ids for _ in range(draws // batch)])
    assert_distributed(np.bincount(tokens // 400, minlength=50), np.full(50, 1 / 50))
    assert_distributed(np.bincount(tokens % 32, minlength=32), np.full(32, 1 / 32))
