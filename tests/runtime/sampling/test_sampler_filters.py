"""Processors and filters against transformers' own, and the sampler's kept set against the definition's."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock.messages import SamplingParams
from penstock.runtime.sampling import reference
from tests.runtime.sampling.sampler_oracle import edited, is_close, kept, scores
from tests.runtime.sampling.samplers import Sampler

NO_IDS = torch.zeros((1, 0), dtype=torch.long)


def params(seed: int = 0, **given: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=1000, **given)  # type: ignore[arg-type]


def random_logits(seed: int, vocab: int, spread: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def apply_edits(
    logits: NDArray[np.float32], given: SamplingParams, prompt: list[int], output: list[int]
) -> NDArray[np.float32]:
    changed = logits.copy()
    sampler = Sampler(logits.size, 1)
    sampler.add(0, given, 0, prompt, output)
    for change in sampler.rows.changes():
        change.write([torch.from_numpy(np.ascontiguousarray(array)) for array in change.arrays])
    reference.edit(changed, 0, len(output), sampler.rows.edits, sampler.token_ids[0].numpy())
    return changed


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.2, 3.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits, ids = random_logits(1, 400), np.random.default_rng(2).integers(0, 400, 90).tolist()
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), torch.from_numpy(logits)[None])[0]
    ours = apply_edits(logits, params(repetition_penalty=penalty), ids[:50], ids[50:])
    assert np.array_equal(ours, theirs.numpy())


@pytest.mark.parametrize("done", [0, 2, 3, 4])
def test_min_tokens_is_that_of_transformers(done: int) -> None:
    logits, prompt, output = random_logits(3, 50), [1, 2, 3, 4], [9] * done
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 3, [5, 6], device="cpu")
    theirs = processor(torch.tensor([prompt + output]), torch.from_numpy(logits)[None])[0]
    given = params(min_tokens=3, eos_token_ids=(5,), stop_token_ids=(6,))
    assert np.array_equal(apply_edits(logits, given, prompt, output), theirs.numpy())


def test_presence_and_frequency_penalties_are_those_of_the_openai_documentation() -> None:
    """mu[j] -= c[j] * alpha_frequency + (c[j] > 0) * alpha_presence, where c counts what was sampled before."""
    logits, output = random_logits(4, 30), [3, 3, 3, 8, 29]
    ours = apply_edits(logits, params(presence_penalty=0.7, frequency_penalty=-0.4), [1, 2, 3, 3], output)
    expected = logits.astype(np.float64)
    for token, times in {3: 3, 8: 1, 29: 1}.items():
        expected[token] -= times * -0.4 + 0.7
    assert ours == pytest.approx(expected, abs=1e-6)
    untouched = np.setdiff1d(np.arange(30), output)
    assert np.array_equal(ours[untouched], logits[untouched])


def test_edits_together_are_those_of_the_definition() -> None:
    given = params(
        logit_bias={1: 4.0, 7: -100.0, 9: 0.5},
        repetition_penalty=1.4,
        presence_penalty=-0.3,
        frequency_penalty=0.6,
        min_tokens=10,
        eos_token_ids=(2,),
    )
    logits, prompt, output = random_logits(5, 60), [1, 5, 9, 9], [7, 30, 30, 1]
    assert apply_edits(logits, given, prompt, output) == pytest.approx(edited(logits, given, prompt, output), abs=1e-5)


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 399},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.001},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 100, "top_p": 0.97, "min_p": 0.01},
]
SIGMA = [
    {"top_n_sigma": 0.5},
    {"top_n_sigma": 2.0},
    {"top_n_sigma": 9.0},
    {"top_n_sigma": 1.5, "top_k": 3},
    {"top_n_sigma": 2.0, "top_p": 0.8},
    {"top_n_sigma": 2.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
]
EVERY = [*FILTERS, *SIGMA]


@pytest.mark.parametrize("given", FILTERS, ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.9])
def test_filters_keep_what_those_of_transformers_keep(given: dict[str, float], temperature: float) -> None:
    """In float64, where their cumulative sums (ascending) and ours (descending) agree."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if "top_k" in given:
        warpers.append(TopKLogitsWarper(int(given["top_k"])))
    if "top_p" in given:
        warpers.append(TopPLogitsWarper(given["top_p"]))
    if "min_p" in given:
        warpers.append(MinPLogitsWarper(given["min_p"]))
    for seed in range(10):
        logits = random_logits(seed, 400).astype(np.float64)
        theirs = warpers(NO_IDS, torch.from_numpy(logits)[None].clone())[0]
        keep = kept(logits, params(temperature=temperature, **given))
        assert np.array_equal(keep, torch.isfinite(theirs).numpy())


def draw_all(logits: NDArray[np.float32], seeds: list[int], **given: object) -> NDArray[np.int64]:
    """The token of each seed, all from the same logits."""
    sampler = Sampler(logits.size, len(seeds))
    for row, seed in enumerate(seeds):
        sampler.add(row, params(seed, **given), 0, [], [])
    sampled = sampler.sample(torch.from_numpy(np.repeat(logits[None], len(seeds), axis=0)), range(len(seeds)))
    assert not sampled.errors
    return np.array(sampled.token_ids)


def tokens_drawn(logits: NDArray[np.float32], draws: int, **given: object) -> set[int]:
    return set(draw_all(logits, list(range(draws)), **given).tolist())


@pytest.mark.parametrize(("n", "expected"), [(0.0, {0, 1, 2, 3}), (1.0, {2, 3}), (3.0, {0, 1, 2, 3})])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_top_n_sigma_is_that_of_llama_cpp(n: float, expected: set[int], temperature: float) -> None:
    """The cases of its tests (tests/test-sampling.cpp). Temperature changes nothing: it divides the deviation, too."""
    logits = np.log(np.array([0.1, 0.2, 0.3, 0.4])).astype(np.float32)
    assert tokens_drawn(logits, 500, top_n_sigma=n, temperature=temperature) == expected


def test_top_n_sigma_keeps_a_token_exactly_at_the_border() -> None:
    logits = np.array([0.0, 2.0, -np.inf, -np.inf], np.float32)  # of the two that count, the deviation is 1
    assert tokens_drawn(logits, 200, top_n_sigma=2.0) == {0, 1}
    assert tokens_drawn(logits, 200, top_n_sigma=2.0 - 1e-9) == {1}


def test_top_n_sigma_keeps_all_of_equal_logits() -> None:
    assert tokens_drawn(np.full(6, 0.1, np.float32), 500, top_n_sigma=0.01) == set(range(6))


@pytest.mark.parametrize("given", EVERY, ids=str)
def test_exactly_the_kept_tokens_are_drawn(given: dict[str, float]) -> None:
    """Of few tokens, each so likely that 3,000 draws show all of them."""
    logits = random_logits(0, 12, 1.0)
    keep = kept(logits.astype(np.float64), params(**given))
    assert tokens_drawn(logits, 3000, **given) == set(np.flatnonzero(keep).tolist())


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_top_p_breaks_ties_and_exact_borders_as_defined(vocab: int, top_p: float) -> None:
    """Equal logits put the border between two tokens: k of n equal tokens hold exactly k/n; the k-th completes it."""
    keep = set(range(int(vocab * top_p)))
    drawn = tokens_drawn(np.zeros(vocab, np.float32), 1500, top_p=top_p)
    assert drawn <= keep
    if vocab == 40:
        assert drawn == keep


@pytest.mark.parametrize("rank", [5, 100, 300])
def test_top_p_near_the_border_is_decided_in_float64(rank: int) -> None:
    """top_p within float32 rounding of a cumulative sum: just above it the next token is kept, just below it is not."""
    logits = random_logits(9, 600, 0.5)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    share, crossing = float((np.cumsum(weights) / weights.sum())[rank - 1]), int(order[rank])
    free = draw_all(logits, list(range(3000)))
    winning = np.flatnonzero(free == crossing).tolist()  # seeds that draw it where nothing is filtered
    assert winning
    assert (draw_all(logits, winning, top_p=share * (1 + 1e-9)) == crossing).all()
    assert (draw_all(logits, winning, top_p=share * (1 - 1e-9)) != crossing).all()


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    logits = np.array([0, 1, 1, 1, 1, 0, 2], np.float32)
    assert tokens_drawn(logits, 500, top_k=3) == {1, 2, 6}
    assert tokens_drawn(np.zeros(3000, np.float32), 500, top_k=2) == {0, 1}


def test_min_p_keeps_a_token_exactly_at_the_border() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.124], np.float64)).astype(np.float32)
    border = float(np.exp(np.float64(logits[2]) - np.float64(logits[0])))
    assert tokens_drawn(logits, 2000, min_p=border * (1 - 1e-12)) == {0, 1, 2}
    assert tokens_drawn(logits, 2000, min_p=border * (1 + 1e-12)) == {0, 1}


@pytest.mark.parametrize("tolerance", [0.02, 0.1])
def test_a_choice_that_is_not_close_survives_any_such_change(tolerance: float) -> None:
    random = np.random.default_rng(10)
    settled = 0
    for seed in range(120):
        given = params(seed, **EVERY[seed % len(EVERY)], temperature=float(random.choice([0.0, 0.5, 1.5])))
        logits = random_logits(seed, 60, 2.0).astype(np.float64)
        if is_close(logits, given, 0, [], [], tolerance):
            continue
        settled += 1
        token = scores(logits, given, 0, [], []).argmax()
        for step in range(10):
            change = random.uniform(-0.5, 0.5, 60) if step else random.choice([-0.5, 0.5], 60)
            assert scores(logits + tolerance * change, given, 0, [], []).argmax() == token
    assert settled > 60


def test_few_choices_are_close_at_the_tolerance_of_float32_logits() -> None:
    cases = [(params(seed, **EVERY[seed % len(EVERY)]), random_logits(seed, 1000)) for seed in range(240)]
    assert sum(is_close(logits, given, 0, [], [], 1e-4) for given, logits in cases) <= 2


@pytest.mark.parametrize(
    ("given", "logits"),
    [
        pytest.param({"temperature": 0.0}, [1.0, 1.0 - 1e-5, -9.0], id="greedy"),
        pytest.param({"top_k": 1}, [1.0, 1.0 - 1e-5, -9.0], id="the best changes, and with it all of top_k"),
        pytest.param({"top_p": 0.3}, [1.0, 1.0 - 1e-5, -9.0], id="the best changes, and with it all of top_p"),
        pytest.param({"top_p": 0.5 + 1e-6}, [1.0, 1.0 - 1e-5, 1.0 - 1e-5, 1.0], id="the share's border"),
    ],
)
def test_close_choices_are_seen(given: dict[str, float], logits: list[float]) -> None:
    """Some change of 1e-5 gives another token: checked with the tokens' logits exchanged."""
    close = [seed for seed in range(60) if is_close(logits, params(seed, **given), 0, [], [], 1e-4)]
    exchanged = [logits[1], logits[0], *logits[2:][::-1]]
    for seed in range(60):
        one, other = (scores(x, params(seed, **given), 0, [], []).argmax() for x in (logits, exchanged))
        assert one == other or seed in close
    assert close
