"""Tokens, logprobs and edits on the device are those of the CPU, for the same logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels.batch_arrays import ALL_BANNED, NOT_FINITE, EditRows, SamplingRows
from penstock.kernels.triton.sampling.edits import edit
from penstock.kernels.triton.sampling.noise import hash_tokens, noise_key
from penstock.messages import SamplingParams
from penstock.runtime.in_flight import STATUS_ERRORS
from penstock.runtime.sampling import noise, reference
from penstock.runtime.sampling.logprobs import pack_logprobs as pack_on_host
from penstock.runtime.step_kernels import TritonStep
from tests.kernels.triton.device import DEVICE, there
from tests.runtime.sampling.samplers import Sampler

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 1.7},
    {"top_p": 1e-9},
    {"top_p": 0.999, "temperature": 5.0},
    {"min_p": 0.05},
    {"min_p": 0.2, "top_p": 0.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.1, "temperature": 2.0},
    {"top_k": 2000, "top_p": 0.99},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.0, "top_p": 0.8},
    {"top_n_sigma": 3.0, "top_k": 40, "temperature": 1.5},
    {"top_n_sigma": 1.5, "top_k": 2000, "top_p": 0.9, "min_p": 0.01},
)


@triton.jit
def hashes_of(stream, index, out, COUNT: tl.constexpr):
    k0, k1 = noise_key(tl.load(stream), tl.load(index))
    token = tl.arange(0, COUNT)
    tl.store(out + token, hash_tokens(token, k0, k1).to(tl.int64))


def samplers(vocab: int, rows: int) -> tuple[Sampler, Sampler]:
    """The GPU's, and the reference."""
    return Sampler(vocab, rows, kernels=TritonStep(), device=DEVICE), Sampler(vocab, rows)


def add(both: tuple[Sampler, Sampler], row: int, params: SamplingParams, output: Sequence[int] = ()) -> None:
    for sampler in both:
        sampler.add(row, params, 1, [], output)


def neutral(rows: int) -> SamplingRows:
    return SamplingRows.empty(rows, DEVICE)


def make_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if seed % 2 else logits  # with many equals


@pytest.mark.parametrize(("vocab", "seed"), [(1, 0), (50, 1), (300, 2), (5001, 3), (9001, 4)])
def test_tokens_are_those_of_the_cpu(vocab: int, seed: int) -> None:
    both = samplers(vocab, len(WAYS) + 1)
    order = np.random.default_rng(seed).permutation(len(WAYS)) + 1  # rows of the batch, in any order
    for row, way in zip(order.tolist(), WAYS, strict=True):
        add(both, row, SamplingParams(seed=2**63 + 1000 * seed + row, max_tokens=9, **way), [0] * row)
    for step in range(2):
        logits = make_logits(len(WAYS), vocab, seed + 2 * step)
        got, want = (sampler.sample(logits.clone(), order) for sampler in both)
        assert not got.errors
        assert got.token_ids == want.token_ids


@pytest.mark.parametrize("vocab", [50, 5001])
def test_masks_are_those_of_the_cpu(vocab: int) -> None:
    both = samplers(vocab, len(WAYS) + 1)
    for row, way in enumerate(WAYS):
        add(both, row, SamplingParams(seed=row, max_tokens=9, logprobs=2 if row % 3 else None, **way))
    random = np.random.default_rng(vocab)
    masks = {row: random.random(vocab) < random.choice([0.98, 0.1]) for row in range(0, len(WAYS), 2)}
    masks[4][:] = False
    masks[6][:] = np.arange(vocab) == vocab - 1
    got, want = (sampler.sample(make_logits(len(WAYS), vocab, 1), range(len(WAYS)), masks) for sampler in both)
    assert got.errors == want.errors == {4: STATUS_ERRORS[ALL_BANNED]}
    assert got.token_ids == want.token_ids
    assert got.token_ids[6] == vocab - 1
    assert all(masks[row][got.token_ids[row]] for row in masks if row != 4)


def test_more_contenders_than_are_listed_are_gone_through() -> None:
    vocab = 20000
    ways: list[dict[str, Any]] = [{"top_p": 0.99}, {"top_k": 19000}, {"top_n_sigma": 4.0, "top_p": 0.99}]
    both = samplers(vocab, len(ways))
    for row, way in enumerate(ways):
        add(both, row, SamplingParams(seed=row, max_tokens=9, temperature=50.0, **way))
    logits = make_logits(len(ways), vocab, 0) * 0.01
    got, want = (sampler.sample(logits.clone(), range(len(ways))) for sampler in both)
    assert got.token_ids == want.token_ids


def test_rows_without_a_token_say_why_and_leave_the_others_alone() -> None:
    both = samplers(5000, 7)
    for row in range(6):
        way = {"top_k": 5} if row % 2 else {}
        add(both, row, SamplingParams(seed=row, max_tokens=9, **way))
    banned = {"min_tokens": 1, "stop_token_ids": tuple(range(5000)), "logprobs": 2}
    add(both, 6, SamplingParams(seed=6, max_tokens=9, **banned))
    logits = make_logits(7, 5000, 0)
    logits[0, 4999], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :4500] = -torch.inf  # a block of banned tokens
    got, want = (sampler.sample(logits.clone(), range(7)) for sampler in both)
    assert got.errors == want.errors
    assert got.errors == {**dict.fromkeys(range(3), STATUS_ERRORS[NOT_FINITE]), 6: STATUS_ERRORS[ALL_BANNED]}
    assert got.token_ids == want.token_ids


def test_the_noise_has_the_bits_of_its_definition() -> None:
    for seed, index in ((0, 0), (2**64 - 1, 7), (12345, 2**31 - 1)):
        stream = np.array([noise.stream(seed, 3)], np.uint64)
        out = torch.zeros(128, dtype=torch.int64, device=DEVICE)
        at = torch.tensor([index], dtype=torch.int32)
        hashes_of[(1,)](there(torch.from_numpy(stream.view(np.int64))), there(at), out, COUNT=128)
        want = noise.hash_tokens(np.arange(128), noise.keys(stream, np.array([index])))
        assert out.tolist() == want[0].tolist()


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (50, 50), (300, 7), (5000, 0), (9001, 3)])
def test_logprobs_are_those_of_the_cpu(vocab: int, k: int) -> None:
    logits = make_logits(3, vocab, vocab)
    logits[1, vocab // 2 :] -= 200.0
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    edits = EditRows.empty(1, 1, 1, DEVICE)
    got = TritonStep().score(there(logits), there(tokens), k, neutral(1), edits).cpu().numpy()
    want = pack_on_host(logits.numpy(), tokens.numpy(), k)
    ids = [0, 2, *range(3, want.shape[1], 2)]
    assert got[:, ids].tolist() == want[:, ids].tolist()
    reals = [1, *range(4, want.shape[1], 2)]
    np.testing.assert_allclose(got.view("<f4")[:, reals], want.view("<f4")[:, reals], rtol=1e-6, atol=1e-5)


def test_more_logprobs_than_tokens_are_refused() -> None:
    logits = there(torch.zeros(1, 5))
    with pytest.raises(ValueError, match="6 logprobs of a vocabulary of 5"):
        TritonStep().score(logits, there(torch.tensor([0])), 6, neutral(1), EditRows.empty(1, 1, 1, DEVICE))


EDITS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"frequency_penalty": -0.4, "min_tokens": 7, "stop_token_ids": (5, 9)},
    {"repetition_penalty": 0.7, "logit_bias": {5: 3.0, 9: -100.0, 2: 1.0}},
    {"logit_bias": {i: float(i) for i in range(8)}, "min_tokens": 9, "stop_token_ids": (1, 2, 3, 5)},
    {"presence_penalty": 1.0, "min_tokens": 1, "stop_token_ids": (7,)},
)


def test_edits_are_those_of_the_cpu() -> None:
    vocab, count = 3001, len(EDITS)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(vocab, (count, 200), generator=generator, dtype=torch.int32)
    token_ids[:, ::7] = 5
    prompts, outputs = torch.tensor([100, 0, 50, 10, 3]), torch.tensor([60, 5, 0, 190, 1])
    logits = torch.randn(count + 1, vocab, generator=generator) * 3
    want = logits.numpy().copy()
    sampler = Sampler(vocab, count)
    for row, way in enumerate(EDITS):
        params = SamplingParams(seed=0, max_tokens=10, **way)
        border, end = int(prompts[row]), int(prompts[row] + outputs[row])
        seen = token_ids[row].tolist()
        sampler.add(row, params, 0, seen[:border], seen[border:end])
    for change in sampler.rows.changes():
        change.write([torch.from_numpy(np.ascontiguousarray(array)) for array in change.arrays])
    edits = sampler.rows.edits
    for row in range(count):
        reference.edit(want[row + 1], row, int(outputs[row]), edits, token_ids[row].numpy())
    places = torch.arange(1, count + 1, dtype=torch.int32)
    rows = torch.arange(-1, count, dtype=torch.int32)
    done = torch.cat([outputs[:1], outputs])
    arguments = there((logits, places, rows, done.int(), edits, token_ids))
    edit(*arguments)
    np.testing.assert_allclose(arguments[0].cpu().numpy(), want, rtol=1e-6, atol=1e-6)
