"""The sampler against its definition, and what a row may and may not depend on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from penstock.messages import SamplingParams, unpack_rows
from tests.runtime.sampling.sampler_oracle import scores
from tests.runtime.sampling.samplers import Sampled, Sampler, sets_with_samplers

Logits = NDArray[np.float32]
MakeSampler = Callable[[int, int], Sampler]


@pytest.fixture(scope="module", params=["numpy", *sets_with_samplers()])
def make(request: pytest.FixtureRequest) -> MakeSampler:
    """Makes samplers that use NumPy or the native kernels."""
    session = None if request.param == "numpy" else Session(ThreadTeam(request.param, 2))
    return lambda vocab_size, max_rows: Sampler(vocab_size, max_rows, session)


def params(seed: int = 0, **given: object) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=1000, **given)  # type: ignore[arg-type]


def draw(sampler: Sampler, logits: Logits, rows: Sequence[int]) -> Sampled:
    return sampler.sample(torch.from_numpy(logits.copy()), rows)


@dataclass
class Choice:
    """One row's request, and a record of what came out."""

    params: SamplingParams
    choice: int = 0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)

    def add_to(self, sampler: Sampler, row: int) -> None:
        sampler.add(row, self.params, self.choice, self.prompt, self.output)

    def next_by_definition(self, logits: Logits) -> int:
        return int(scores(logits, self.params, self.choice, self.prompt, self.output).argmax())


def some_choice(random: np.random.Generator, vocab: int) -> Choice:
    """Parameters of every kind, each off half of the time."""
    pick = random.choice
    given: dict[str, object] = {
        "temperature": float(pick([0.0, 0.3, 1.0, 1.0, 1.7])),
        "top_k": int(pick([0, 0, 0, 1, 5, 40, vocab - 1, vocab, 10 * vocab])),
        "top_p": float(pick([1.0, 1.0, 0.9, 0.5, 0.05, 0.999, 0.0])),
        "min_p": float(pick([0.0, 0.0, 0.01, 0.2, 1.0])),
        "top_n_sigma": float(pick([0.0, 0.0, 0.0, 0.5, 1.3, 2.9, 50.0])),
        "logprobs": pick([None, None, 0, 3]),
    }
    if random.random() < 0.4:
        given |= {
            "repetition_penalty": float(pick([1.0, 1.3, 0.8])),
            "presence_penalty": float(pick([0.0, 0.7, -0.5])),
            "frequency_penalty": float(pick([0.0, 0.3])),
            "logit_bias": {int(t): float(pick([-100, 5, 100])) for t in random.integers(0, vocab, 3)},
            "min_tokens": int(pick([0, 5, 20])),
            "eos_token_ids": (int(random.integers(vocab)),),
            "stop_token_ids": (int(random.integers(vocab)),),
        }
    ids = random.integers(0, vocab, 24).tolist()
    return Choice(params(int(random.integers(0, 2**63)), **given), int(random.integers(4)), ids[:16], ids[16:])


@pytest.mark.parametrize("vocab", [3, 50, 777, 6144])
@pytest.mark.parametrize("spread", [0.3, 3.0, 12.0])
def test_every_row_gets_the_token_of_its_definition(make: MakeSampler, vocab: int, spread: float) -> None:
    random = np.random.default_rng(vocab)
    choices = [some_choice(random, vocab) for _ in range(32)]
    sampler = make(vocab, len(choices))
    for row, choice in enumerate(choices):
        choice.add_to(sampler, row)
    for step in range(6):
        logits = (random.standard_normal((len(choices), vocab)) * spread).astype(np.float32)
        if step % 2:
            logits = np.round(logits * 2) / 2  # many equal logits
        sampled = draw(sampler, logits, range(len(choices)))
        assert not sampled.errors
        for row, choice in enumerate(choices):
            assert sampled.token_ids[row] == choice.next_by_definition(logits[row]), choice
            choice.output.append(sampled.token_ids[row])


def test_large_vocabulary(make: MakeSampler) -> None:
    """Where the shortcuts matter: rows too long for one pass, filters that leave little and filters that leave most."""
    vocab, random = 151936, np.random.default_rng(5)
    filters: list[dict[str, object]] = [
        {},
        {"top_k": 1000},
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"min_p": 0.02},
        {"top_p": 0.7, "min_p": 1e-4},
        {"top_n_sigma": 1.5},
        {"top_n_sigma": 2.5, "top_p": 0.8},
        {"top_n_sigma": 4.0, "top_k": 50},
    ]
    choices = [Choice(params(seed, **given)) for seed, given in enumerate(filters)]
    flat = random.standard_normal((len(choices), vocab)).astype(np.float32)
    peaked = (-2.0 * np.log1p(np.stack([random.permutation(vocab) for _ in choices])) + flat).astype(np.float32)
    sampler = make(vocab, len(choices))
    for row, choice in enumerate(choices):
        choice.add_to(sampler, row)
    for logits in (flat, peaked, flat):
        sampled = draw(sampler, logits, range(len(choices)))
        for row, choice in enumerate(choices):
            assert sampled.token_ids[row] == choice.next_by_definition(logits[row]), choice
            choice.output.append(sampled.token_ids[row])


def test_a_row_does_not_depend_on_the_batch(make: MakeSampler) -> None:
    """Tokens and logprob bytes, alone and at every place of batches of 32, 7 and 2: bit for bit."""
    vocab, random = 5003, np.random.default_rng(11)
    choices = [some_choice(random, vocab) for _ in range(32)]
    logits = (random.standard_normal((32, vocab)) * 3).astype(np.float32)

    def sample(members: Sequence[int]) -> dict[int, tuple[int, bytes]]:
        sampler = make(vocab, 40)
        places = random.permutation(40)[: len(members)].tolist()
        for place, member in zip(places, members, strict=True):
            choices[member].add_to(sampler, place)
        sampled = draw(sampler, logits[list(members)], places)
        return dict(zip(members, zip(sampled.token_ids, sampled.logprobs, strict=True), strict=True))

    alone = {member: sample([member])[member] for member in range(32)}
    for size in (32, 32, 7, 7, 2, 2):
        members = random.permutation(32)[:size].tolist()
        for member, result in sample(members).items():
            assert result == alone[member]


def test_resuming_from_the_middle_goes_on_as_if_it_had_never_stopped(make: MakeSampler) -> None:
    vocab, random = 300, np.random.default_rng(3)
    steps = [(random.standard_normal((16, vocab)) * 2).astype(np.float32) for _ in range(12)]
    choices = [some_choice(random, vocab) for _ in range(16)]
    whole = make(vocab, 16)
    for row, choice in enumerate(choices):
        choice.add_to(whole, row)
    resumed: Sampler | None = None
    for number, logits in enumerate(steps):
        if number % 4 == 3:
            resumed = make(vocab, 16)
            for row, choice in enumerate(choices):
                choice.add_to(resumed, row)
        sampled = draw(whole, logits, range(16))
        if resumed:
            assert draw(resumed, logits, range(16)) == sampled
        for choice, token in zip(choices, sampled.token_ids, strict=True):
            choice.output.append(token)


def test_a_row_taken_over_keeps_nothing_of_its_former_life(make: MakeSampler) -> None:
    vocab, random = 200, np.random.default_rng(4)
    used, fresh = make(vocab, 2), make(vocab, 2)
    used.add(
        1,
        params(logit_bias={7: 100.0}, frequency_penalty=2.0, min_tokens=9, stop_token_ids=(3,), logprobs=2),
        0,
        [],
        [],
    )
    draw(used, random.standard_normal((1, vocab)).astype(np.float32), [1])
    used.remove(1)
    for sampler in (used, fresh):
        sampler.add(1, params(8, top_p=0.9), 2, [1, 2], [3])
    for _ in range(5):
        logits = random.standard_normal((1, vocab)).astype(np.float32)
        assert draw(used, logits, [1]) == draw(fresh, logits, [1])
    used.add(1, params(temperature=0.0), 0, [], [])  # without a remove between
    assert draw(used, logits, [1]).token_ids == [int(logits.argmax())]


def test_rows_may_come_in_any_order_and_number(make: MakeSampler) -> None:
    sampler = make(4, 3)
    for row in range(3):
        sampler.add(row, params(temperature=0.0), 0, [], [])
    logits = np.eye(3, 4, dtype=np.float32)
    assert draw(sampler, logits, [2, 0, 1]).token_ids == [0, 1, 2]
    assert draw(sampler, logits[:1], [1]).token_ids == [0]
    assert draw(sampler, logits[:0], []) == Sampled([], [], {})


def test_greedy_takes_the_lowest_of_equals_whatever_else_is_asked(make: MakeSampler) -> None:
    sampler = make(6, 3)
    sampler.add(0, params(temperature=0.0), 0, [], [])
    sampler.add(1, params(temperature=0.0, top_k=1, top_p=0.1, min_p=0.9), 3, [], [])
    sampler.add(2, params(temperature=1.0, top_k=1), 0, [], [])
    logits = np.tile(np.array([0, 2, 1, 2, 2, 0], np.float32), (3, 1))
    assert draw(sampler, logits, [0, 1, 2]).token_ids == [1, 1, 1]


def test_greedy_penalties_follow_the_output(make: MakeSampler) -> None:
    """With a frequency penalty the best token gives way to the next as it repeats."""
    sampler = make(3, 1)
    sampler.add(0, params(temperature=0.0, frequency_penalty=0.5), 0, [0, 0, 0, 0], [])
    logits = np.array([[1.0, 0.7, 0.0]], np.float32)
    assert [draw(sampler, logits, [0]).token_ids[0] for _ in range(6)] == [0, 1, 0, 1, 0, 2]


def test_many_distinct_outputs_are_all_remembered(make: MakeSampler) -> None:
    vocab = 500
    sampler = make(vocab, 1)
    sampler.add(0, params(temperature=0.0, presence_penalty=2.0), 0, [], [])
    logits = np.linspace(1, 0, vocab, dtype=np.float32)[None]
    assert [draw(sampler, logits, [0]).token_ids[0] for _ in range(vocab)] == list(range(vocab))


def test_logit_bias_bans_and_forces(make: MakeSampler) -> None:
    logits = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    for seed in range(50):
        sampler = make(4, 2)
        sampler.add(0, params(seed, logit_bias={0: -100.0, 1: -100.0}), 0, [], [])
        sampler.add(1, params(seed, logit_bias={3: 100.0}), 0, [], [])
        banned, forced = draw(sampler, np.repeat(logits, 2, axis=0), [0, 1]).token_ids
        assert banned in (2, 3) and forced == 3


def test_stops_wait_for_min_tokens(make: MakeSampler) -> None:
    sampler = make(4, 3)
    stops: dict[str, object] = {"temperature": 0.0, "min_tokens": 3, "eos_token_ids": (0,), "stop_token_ids": (1, 999)}
    sampler.add(0, params(**stops), 0, [], [])
    sampler.add(1, params(**stops), 0, [], [2])  # one has come out before
    sampler.add(2, params(ignore_eos=True, **stops), 0, [], [])  # so that 0 is a token like any other
    logits = np.tile(np.array([3, 2, 1, 0], np.float32), (3, 1))
    steps = [draw(sampler, logits, [0, 1, 2]).token_ids for _ in range(4)]
    assert steps == [[2, 2, 0], [2, 2, 0], [2, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [np.nan, np.inf, "every -inf"])
def test_a_broken_row_fails_alone(make: MakeSampler, broken: float | str, temperature: float) -> None:
    vocab, random = 100, np.random.default_rng(6)
    logits = random.standard_normal((3, vocab)).astype(np.float32)
    healthy = make(vocab, 3)
    sampler = make(vocab, 3)
    for row in range(3):
        for each in (healthy, sampler):
            each.add(row, params(row, temperature=temperature, frequency_penalty=0.1 * row, logprobs=2), 0, [], [])
    expected = draw(healthy, logits, [0, 1, 2])
    spoilt = logits.copy()
    spoilt[1, 50 if isinstance(broken, float) else slice(None)] = broken if isinstance(broken, float) else -np.inf
    sampled = draw(sampler, spoilt, [0, 1, 2])
    assert list(sampled.errors) == [1] and "not finite" in sampled.errors[1]
    assert sampled.token_ids == [expected.token_ids[0], 0, expected.token_ids[2]]
    assert sampled.logprobs == [expected.logprobs[0], b"", expected.logprobs[2]]
    # Nothing was recorded for it: its next token is still its first.
    assert draw(sampler, logits[1:2], [1]).token_ids == expected.token_ids[1:2]


def test_a_row_with_every_token_banned_fails_alone(make: MakeSampler) -> None:
    sampler = make(2, 2)
    sampler.add(0, params(min_tokens=1, stop_token_ids=(0, 1)), 0, [], [])
    sampler.add(1, params(temperature=0.0), 0, [], [])
    sampled = draw(sampler, np.array([[1, 0], [0, 1]], np.float32), [0, 1])
    assert list(sampled.errors) == [0] and "min_tokens" in sampled.errors[0]
    assert sampled.token_ids[1] == 1


@pytest.mark.parametrize("given", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_n_sigma": 2.0}])
def test_single_masked_logits_are_never_drawn(make: MakeSampler, given: dict[str, object]) -> None:
    """A model may mask tokens of its own with -inf."""
    logits = np.full((200, 20), -np.inf, np.float32)
    logits[:, [4, 9]] = [0.0, 1.0]
    sampler = make(20, 200)
    for row in range(200):
        sampler.add(row, params(row, **given), 0, [], [])
    assert set(draw(sampler, logits, range(200)).token_ids) == {4, 9}


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e-4, 1e6, 1e300])
def test_extreme_temperatures(make: MakeSampler, temperature: float) -> None:
    random = np.random.default_rng(7)
    logits = (random.standard_normal((40, 64)) * 10).astype(np.float32)
    sampler = make(64, 40)
    filters: list[dict[str, object]] = [{}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.5}]
    for row in range(40):
        sampler.add(row, params(row, temperature=temperature, **filters[row % 4]), 0, [], [])
    tokens = draw(sampler, logits, range(40)).token_ids
    if temperature < 1:
        assert tokens == logits.argmax(axis=1).tolist()
    else:
        assert len(set(tokens)) > 15


def test_extreme_logits(make: MakeSampler) -> None:
    logits = np.zeros((4, 8), np.float32)
    logits[:] = np.finfo(np.float32).min
    logits[:, 5] = np.finfo(np.float32).max
    sampler = make(8, 4)
    for row, given in enumerate([{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}]):
        sampler.add(row, params(temperature=1e-4, repetition_penalty=1.5, **given), 0, [5], [])
    assert draw(sampler, logits, range(4)).token_ids == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("given", "prompt", "output", "named"),
    [
        ({"logit_bias": {10: 1.0}}, [], [], "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, [], [], "logit_bias"),
        ({"repetition_penalty": 1.2}, [3, 10], [], "prompt"),
        ({"presence_penalty": 1.2}, [], [-1], "output"),
    ],
)
def test_ids_without_a_logit_are_refused(
    make: MakeSampler, given: dict[str, object], prompt: list[int], output: list[int], named: str
) -> None:
    sampler = make(10, 1)
    sampler.add(0, params(temperature=0.0), 0, [], [])
    with pytest.raises(ValueError, match=named):
        sampler.add(0, params(**given), 0, prompt, output)
    logits = np.arange(10, dtype=np.float32)[None]
    assert draw(sampler, logits, [0]).token_ids == [9], "the row is as it was"


def test_logprobs_are_of_the_raw_logits(make: MakeSampler) -> None:
    """Logprobs ignore bias, penalties, temperature and filters; the sampled token is the edited choice."""
    random = np.random.default_rng(8)
    logits = random.standard_normal((3, 50)).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits), -1).numpy()
    sampler = make(50, 3)
    sampler.add(0, params(1, logprobs=4, logit_bias={17: 100.0}, repetition_penalty=1.5), 0, [1, 2, 3], [])
    sampler.add(1, params(2, temperature=0.0), 0, [], [])
    sampler.add(2, params(3, logprobs=0, temperature=3.0, top_k=5), 0, [], [])
    sampled = draw(sampler, logits, [0, 1, 2])
    assert sampled.logprobs[1] == b""
    (first,), (third,) = unpack_rows(sampled.logprobs[0], 4), unpack_rows(sampled.logprobs[2], 0)
    assert first.token_id == sampled.token_ids[0] == 17
    assert first.logprob == pytest.approx(expected[0, 17], abs=1e-5)
    assert first.rank == 1 + int((logits[0] > logits[0, 17]).sum())
    assert [token for token, _ in first.top] == np.argsort(-logits[0])[:4].tolist()
    assert [value for _, value in first.top] == pytest.approx(np.sort(expected[0])[:-5:-1].tolist(), abs=1e-5)
    assert third.token_id == sampled.token_ids[2] and third.top == ()


@pytest.mark.parametrize("gap", [7.5, 8.5, 9.5, 11.0])
def test_one_of_many_unlikely_tokens_wins_as_often_as_it_should(make: MakeSampler, gap: float) -> None:
    """A best token, and together heavier than it 20,000 tokens far below: a win takes extraordinary noise."""
    vocab, rows = 20000, 60
    logits = np.full((rows, vocab), -gap, np.float32)
    logits[:, 123] = 0.0
    logits += np.random.default_rng(int(gap)).uniform(-0.1, 0.1, vocab).astype(np.float32)
    choices = [Choice(params(seed)) for seed in range(rows)]
    sampler = make(vocab, rows)
    for row, choice in enumerate(choices):
        choice.add_to(sampler, row)
    tokens = draw(sampler, logits, range(rows)).token_ids
    assert tokens == [choice.next_by_definition(logits[row]) for row, choice in enumerate(choices)]
    assert 0 < sum(token != 123 for token in tokens) < rows
