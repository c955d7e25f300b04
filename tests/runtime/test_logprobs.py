"""Packed logprobs against torch's log-softmax and sort."""

import numpy as np
import pytest
import torch

from penstock.messages import TokenLogprobs, pack_row, unpack_rows
from penstock.runtime.logprobs import pack_logprobs, prompt_logprob_rows


def reference_rows(logits: torch.Tensor, targets: torch.Tensor, k: int) -> list[TokenLogprobs]:
    rows = []
    for row, target in zip(logits, targets.tolist(), strict=True):
        logprobs = torch.log_softmax(row.double(), -1)
        best = torch.sort(row, descending=True, stable=True).indices[:k].tolist()  # stable: equals by ascending id
        rank = 1 + int((row > row[target]).sum())
        top = tuple((token, float(logprobs[token])) for token in best)
        rows.append(TokenLogprobs(target, float(logprobs[target]), rank, top))
    return rows


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab", [20, 301, 6144, 60000])
@pytest.mark.parametrize("ties", [False, True])
def test_prompt_rows(k: int, vocab: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(vocab + k)
    logits = torch.randn((9, vocab), generator=generator) * 4
    if ties:
        logits = logits.round()
    targets = torch.randint(0, vocab, (9,), generator=generator)
    rows = list(unpack_rows(prompt_logprob_rows(logits, targets, k), k))
    for row, expected in zip(rows, reference_rows(logits, targets, k), strict=True):
        assert (row.token_id, row.rank) == (expected.token_id, expected.rank)
        assert [token for token, _ in row.top] == [token for token, _ in expected.top]
        assert row.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [value for _, value in row.top] == pytest.approx([value for _, value in expected.top], abs=1e-5)


def test_layout_is_that_of_pack_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    packed = prompt_logprob_rows(logits, torch.tensor([2]), 2)
    assert packed == pack_row(next(unpack_rows(packed, 2)))
    assert next(unpack_rows(packed, 2)).rank == 3


def test_a_row_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn((33, 5003), generator=generator), torch.arange(33)
    together = prompt_logprob_rows(logits, targets, 7)
    alone = b"".join(prompt_logprob_rows(logits[i : i + 1], targets[i : i + 1], 7) for i in range(33))
    assert together == alone


def test_rows_may_want_different_numbers() -> None:
    logits = np.random.default_rng(2).standard_normal((4, 100)).astype(np.float32)
    rows, tokens, wanted = np.array([3, 0, 1]), np.array([9, 8, 7]), np.array([0, 5, 2])
    packed = pack_logprobs(logits, rows, tokens, wanted)
    for one, row, token, k in zip(packed, rows, tokens, wanted.tolist(), strict=True):
        assert one == prompt_logprob_rows(torch.from_numpy(logits[row : row + 1]), torch.tensor([int(token)]), k)


def test_masked_logits_have_logprob_minus_infinity() -> None:
    logits = torch.tensor([[-np.inf, 0.0, -np.inf, 0.0]])
    (row,) = unpack_rows(prompt_logprob_rows(logits, torch.tensor([2]), 4), 4)
    assert row.logprob == -np.inf and row.rank == 3
    assert [token for token, _ in row.top] == [1, 3, 0, 2]


def test_no_rows_and_too_many_asked() -> None:
    assert prompt_logprob_rows(torch.zeros((0, 10)), torch.zeros(0, dtype=torch.int64), 3) == b""
    with pytest.raises(ValueError, match="11 logprobs of a vocabulary of 10"):
        prompt_logprob_rows(torch.zeros((1, 10)), torch.zeros(1, dtype=torch.int64), 11)
