"""The native sampler against the NumPy reference: the same tokens, ranks and errors, on any number of threads."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from penstock.messages import unpack_rows
from tests.runtime.sampling.samplers import Sampled, Sampler, sets_with_samplers
from tests.runtime.sampling.test_sampler import Choice, params, some_choice

Logits = NDArray[np.float32]
ROWS = 32


class Sessions(NamedTuple):
    one_thread: Session
    two_threads: Session


@pytest.fixture(scope="module", params=sets_with_samplers())
def sessions(request: pytest.FixtureRequest) -> Sessions:
    return Sessions(*(Session(ThreadTeam(request.param, threads)) for threads in (1, 2)))


Masks = dict[int, NDArray[np.bool_]]


def draw(sampler: Sampler, logits: Logits, rows: Sequence[int], masks: Masks | None = None) -> Sampled:
    return sampler.sample(torch.from_numpy(logits.copy()), rows, masks or {})


def some_masks(random: np.random.Generator, vocab: int, rows: int) -> Masks:
    """Of half of the rows: almost everything, half of the tokens, a few in one place, one, or none at all."""
    masks = {}
    for row in np.flatnonzero(random.random(rows) < 0.5).tolist():
        allowed = random.random(vocab) < random.choice([0.999, 0.5, 0.0])
        first = random.integers(vocab)
        allowed[first : first + random.choice([0, 1, 40])] = True
        masks[row] = allowed
    return masks


def make(choices: Sequence[Choice], vocab: int, session: Session | None) -> Sampler:
    sampler = Sampler(vocab, len(choices), session)
    for row, choice in enumerate(choices):
        choice.add_to(sampler, row)
    return sampler


def assert_same(native: Sampled, expected: Sampled, choices: Sequence[Choice]) -> None:
    """Logprobs are sums, whose last bits may differ; all else is equal."""
    assert native.errors == expected.errors
    for i, choice in enumerate(choices):
        assert native.token_ids[i] == expected.token_ids[i], choice
        assert len(native.logprobs[i]) == len(expected.logprobs[i])
        k = choice.params.logprobs or 0
        for got, want in zip(unpack_rows(native.logprobs[i], k), unpack_rows(expected.logprobs[i], k), strict=True):
            assert (got.token_id, got.rank) == (want.token_id, want.rank)
            assert [token for token, _ in got.top] == [token for token, _ in want.top]
            assert got.logprob == pytest.approx(want.logprob, abs=2e-5)
            assert [p for _, p in got.top] == pytest.approx([p for _, p in want.top], abs=2e-5)


def some_logits(random: np.random.Generator, vocab: int, step: int) -> Logits:
    """By step: all different, many equal, half of them masked, or all equal; and one row broken."""
    logits = (random.standard_normal((ROWS, vocab)) * random.choice([0.3, 3.0, 12.0])).astype(np.float32)
    if step % 4 == 1:
        logits = np.round(logits * 2) / 2
    elif step % 4 == 2:
        logits[random.random(logits.shape) < 0.5] = -np.inf
    elif step % 4 == 3:
        logits[:] = random.choice([-3.0, 0.0, 7.5])
    broken = random.integers(ROWS)
    logits[broken, random.integers(vocab)] = random.choice([np.nan, np.inf, -np.inf])
    if step == 0:
        logits[broken] = -np.inf
        logits[broken, -1] = random.choice([-np.inf, 0.0])
    return logits


@pytest.mark.parametrize("vocab", [3, 16, 17, 255, 256, 257, 777, 4112, 20001])
def test_random_rows_get_the_same_tokens(sessions: Sessions, vocab: int) -> None:
    """Thousands of rows of every kind of parameters, one after the other so that penalties and counters move on."""
    for seed in range(3 if vocab < 10000 else 1):
        random = np.random.default_rng(vocab * 10 + seed)
        choices = [some_choice(random, vocab) for _ in range(ROWS)]
        samplers = [make(choices, vocab, session) for session in (None, *sessions)]
        for step in range(8):
            logits = some_logits(random, vocab, step)
            expected, one, two = (draw(sampler, logits, range(ROWS)) for sampler in samplers)
            assert_same(one, expected, choices)
            assert two == one, "the number of threads shows"


@pytest.mark.parametrize("vocab", [3, 31, 32, 33, 777, 4112])
def test_masked_rows_get_the_same_tokens_and_leave_the_others_alone(sessions: Sessions, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    choices = [some_choice(random, vocab) for _ in range(ROWS)]
    samplers = [make(choices, vocab, session) for session in (None, *sessions, None)]
    for step in range(8):
        logits, masks = some_logits(random, vocab, step), some_masks(random, vocab, ROWS)
        expected, one, two, plain = (
            draw(sampler, logits, range(ROWS), each)
            for sampler, each in zip(samplers, (masks, masks, masks, {}), strict=True)
        )
        assert_same(one, expected, choices)
        assert two == one, "the number of threads shows"
        for row in range(ROWS):
            if row in masks and row not in expected.errors:
                assert masks[row][expected.token_ids[row]], "the token is not allowed"
            elif row not in masks and step == 0:
                assert expected.token_ids[row] == plain.token_ids[row]
                assert expected.logprobs[row] == plain.logprobs[row]


@pytest.mark.parametrize("temperature", [2e-5, 0.01, 0.7, 50.0, 1e30])
@pytest.mark.parametrize("vocab", [1, 15, 272, 2900])
def test_extreme_temperatures_and_logits(sessions: Sessions, temperature: float, vocab: int) -> None:
    """Rows far from 0, rows that differ in the last bits only, masked blocks and lanes, and rows of two values."""
    random = np.random.default_rng(vocab)
    shares = [1.0, 0.999999, 0.9, 0.5, 0.1, 1e-9]
    choices = [Choice(params(seed, temperature=temperature, top_p=shares[seed % 6])) for seed in range(120)]
    logits = random.standard_normal((len(choices), vocab)).astype(np.float32)
    logits[0::5] = logits[0::5] * 30 - 9000
    logits[1::5] = 1 + np.round(logits[1::5] * 4) * np.float32(2**-23)
    logits[2::5, 256:2816] = -np.inf
    logits[2::10, 1:256:2] = -np.inf
    logits[3::5] = np.where(logits[3::5] > 1.5, 2.0, -1.5)
    samplers = [make(choices, vocab, session) for session in (None, sessions.two_threads)]
    for _ in range(3):
        expected, native = (draw(sampler, logits, range(len(choices))) for sampler in samplers)
        assert_same(native, expected, choices)


def test_large_vocabulary(sessions: Sessions) -> None:
    vocab = 151936
    random = np.random.default_rng(7)
    choices = [some_choice(random, vocab) for _ in range(10)]
    samplers = [make(choices, vocab, session) for session in (None, sessions.two_threads)]
    ranks = random.permutation(vocab) + 1
    for step in range(3):
        logits = some_logits(random, vocab, step)[: len(choices)]
        logits -= np.float32(step % 2) * np.log(ranks).astype(np.float32)
        expected, native = (draw(sampler, logits, range(len(choices))) for sampler in samplers)
        assert_same(native, expected, choices)


@pytest.mark.parametrize("vocab", [300, 9000])
def test_a_row_alone_gets_what_it_gets_in_company(sessions: Sessions, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    choices = [some_choice(random, vocab) for _ in range(ROWS)]
    logits = some_logits(random, vocab, 1)
    together = draw(make(choices, vocab, sessions.two_threads), logits, range(ROWS))
    for i, choice in enumerate(choices):
        alone = draw(make([choice], vocab, sessions.two_threads), logits[i : i + 1], [0])
        assert (alone.token_ids[0], alone.logprobs[0]) == (together.token_ids[i], together.logprobs[i])
        assert alone.errors.get(0) == together.errors.get(i)


@pytest.mark.parametrize("vocab", [40, 3000])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75])
def test_exact_borders_of_top_p(sessions: Sessions, vocab: int, top_p: float) -> None:
    """k of n equal tokens hold exactly k/n: the next is out, whatever sums of weights round to."""
    choices = [Choice(params(seed, top_p=top_p)) for seed in range(400)]
    logits = np.zeros((len(choices), vocab), np.float32)
    tokens = draw(make(choices, vocab, sessions.two_threads), logits, range(len(choices))).token_ids
    assert max(tokens) < vocab * top_p
    assert tokens == draw(make(choices, vocab, None), logits, range(len(choices))).token_ids


@pytest.mark.parametrize("rank", [5, 100, 300])
def test_top_p_near_the_border_is_decided_in_float64(sessions: Sessions, rank: int) -> None:
    """top_p so close to a cumulative sum that float32 cannot separate them."""
    row = (np.random.default_rng(9).standard_normal(600) * 0.5).astype(np.float32)
    order = np.argsort(-row, kind="stable")
    cumulative = np.cumsum(np.exp(row[order].astype(np.float64) - row.max()))
    share = float(cumulative[rank - 1] / cumulative[-1])
    for top_p in (share * (1 - 1e-9), share * (1 + 1e-9)):
        choices = [Choice(params(seed, top_p=top_p)) for seed in range(1500)]
        logits = np.repeat(row[None], len(choices), axis=0)
        expected, native = (
            draw(make(choices, 600, session), logits, range(len(choices))) for session in (None, sessions.two_threads)
        )
        assert native == expected
        assert (int(order[rank]) in native.token_ids) == (top_p > share)


def test_edits_are_those_of_numpy_bit_for_bit(sessions: Sessions) -> None:
    """Greedy rows whose penalised logits lie so close that another rounding gives another token."""
    vocab, random = 64, np.random.default_rng(3)
    choices = [
        Choice(
            params(
                row,
                temperature=0.0,
                repetition_penalty=float(random.uniform(0.8, 1.5)),
                presence_penalty=float(random.uniform(-1, 1)),
                frequency_penalty=float(random.uniform(-1, 1)),
                logit_bias={int(t): float(random.uniform(-1, 1)) for t in random.integers(0, vocab, 8)},
            ),
            0,
            random.integers(0, vocab, 40).tolist(),
            random.integers(0, vocab, 40).tolist(),
        )
        for row in range(ROWS)
    ]
    samplers = [make(choices, vocab, session) for session in (None, sessions.one_thread)]
    for _ in range(50):
        logits = (1 + random.integers(0, 3, (ROWS, vocab)) * 2.0**-23).astype(np.float32)
        expected, native = (draw(sampler, logits, range(ROWS)) for sampler in samplers)
        assert native == expected


def test_logits_are_left_as_they_were(sessions: Sessions) -> None:
    choices = [Choice(params(1, logit_bias={2: 100.0}, min_tokens=3, stop_token_ids=(2, 4), presence_penalty=1.0))]
    logits = torch.arange(20, dtype=torch.float32)[None]
    make(choices, 20, sessions.one_thread).sample(logits, [0])
    assert logits.tolist() == [list(range(20))]


def test_more_logprobs_than_tokens_are_refused(sessions: Sessions) -> None:
    with pytest.raises(ValueError, match="11 logprobs of a vocabulary of 10"):
        make([Choice(params(logprobs=11))], 10, sessions.one_thread)
