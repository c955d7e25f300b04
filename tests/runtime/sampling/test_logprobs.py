"""Packed logprobs against torch's log-softmax and sort."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.session import native_session
from penstock.messages import SamplingParams, TokenLogprobs, pack_row, unpack_rows
from tests.runtime.sampling.samplers import Sampler

Score = Callable[[torch.Tensor, torch.Tensor, int], bytes]


def reference_rows(logits: torch.Tensor, targets: torch.Tensor, k: int) -> list[TokenLogprobs]:
    rows = []
    for row, target in zip(logits, targets.tolist(), strict=True):
        logprobs = torch.log_softmax(row.double(), -1)
        best = torch.sort(row, descending=True, stable=True).indices[:k].tolist()  # stable: equals by ascending id
        rank = 1 + int((row > row[target]).sum())
        top = tuple((token, float(logprobs[token])) for token in best)
        rows.append(TokenLogprobs(target, float(logprobs[target]), rank, top))
    return rows


@pytest.fixture(params=["numpy", "native"] if instruction_sets() else ["numpy"])
def score(request: pytest.FixtureRequest) -> Score:
    """Returns packed rows of targets with k alternatives each, from one implementation."""
    session = native_session() if request.param == "native" else None

    def rows(logits: torch.Tensor, targets: torch.Tensor, k: int) -> bytes:
        sampler = Sampler(logits.shape[1], max(len(targets), 1), session)
        packed = sampler.kernels.score(logits.clone(), targets, k, sampler.rows.rows, sampler.rows.edits)
        return packed.numpy().tobytes()

    return rows


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [20, 301, 6144, 60000])
@pytest.mark.parametrize("ties", [False, True])
def test_prompt_rows(k: int, vocab: int, ties: bool, score: Score) -> None:
    generator = torch.Generator().manual_seed(vocab + k)
    logits = torch.randn((9, vocab), generator=generator) * 4
    if ties:
        logits = logits.round()
    targets = torch.randint(0, vocab, (9,), generator=generator)
    rows = list(unpack_rows(score(logits, targets, k), k))
    for row, expected in zip(rows, reference_rows(logits, targets, k), strict=True):
        assert (row.token_id, row.rank) == (expected.token_id, expected.rank)
        assert [token for token, _ in row.top] == [token for token, _ in expected.top]
        assert row.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [value for _, value in row.top] == pytest.approx([value for _, value in expected.top], abs=1e-5)


def test_layout_is_that_of_pack_row(score: Score) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    packed = score(logits, torch.tensor([2]), 2)
    assert packed == pack_row(next(unpack_rows(packed, 2)))
    assert next(unpack_rows(packed, 2)).rank == 3


def test_a_row_does_not_depend_on_the_others(score: Score) -> None:
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn((33, 5003), generator=generator), torch.arange(33)
    together = score(logits, targets, 7)
    alone = b"".join(score(logits[i : i + 1], targets[i : i + 1], 7) for i in range(33))
    assert together == alone


def test_masked_logits_have_logprob_minus_infinity(score: Score) -> None:
    logits = torch.tensor([[-np.inf, 0.0, -np.inf, 0.0]])
    (row,) = unpack_rows(score(logits, torch.tensor([2]), 4), 4)
    assert row.logprob == -np.inf and row.rank == 3
    assert [token for token, _ in row.top] == [1, 3, 0, 2]


def test_no_rows_and_too_many_asked(score: Score) -> None:
    assert score(torch.zeros((0, 10)), torch.zeros(0, dtype=torch.int64), 3) == b""
    with pytest.raises(ValueError, match="11 logprobs of a vocabulary of 10"):
        Sampler(10, 1).add(0, SamplingParams(seed=0, max_tokens=1, logprobs=11), 0, [], [])
