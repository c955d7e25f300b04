"""Tokens, logprobs and edits on the device are those of the CPU, for the same logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from penstock.kernels.resident import CHOSEN, NOT_FINITE, Chosen, EditParameters, Parameters
from penstock.kernels.triton.edits import edit
from penstock.kernels.triton.logprobs import pack_logprobs
from penstock.kernels.triton.noise import hash_tokens, noise_key
from penstock.kernels.triton.sampling import sample
from penstock.kernels.triton.survey import Survey
from penstock.messages import SamplingParams
from penstock.runtime import noise
from penstock.runtime.logit_edits import LogitEdits
from penstock.runtime.logprobs import pack_logprobs as pack_on_host
from penstock.runtime.numpy_chooser import NumPyChooser
from penstock.runtime.sampling_batch import SamplingBatch
from tests.kernels.triton.device import DEVICE, there

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
)


@triton.jit
def hashes_of(stream, index, out, COUNT: tl.constexpr):
    k0, k1 = noise_key(tl.load(stream), tl.load(index))
    token = tl.arange(0, COUNT)
    tl.store(out + token, hash_tokens(token, k0, k1).to(tl.int64))


def draw(logits: torch.Tensor, batch: SamplingBatch, rows: Sequence[int]) -> tuple[Chosen, Parameters]:
    arrays = (batch.kind, batch.temperature, batch.top_p, batch.min_p, batch.top_k)
    held = [torch.from_numpy(np.array(array)) for array in (*arrays, batch.streams.view(np.int64), batch.num_outputs)]
    like = Parameters.empty(1, DEVICE)
    dtypes = [getattr(like, name).dtype for name in Parameters.__dataclass_fields__]
    parameters = Parameters(*(there(array.to(dtype)) for array, dtype in zip(held, dtypes, strict=True)))
    of_rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    survey = Survey.of(there(logits), of_rows, parameters)
    return sample(there(logits), of_rows, parameters, survey, filtered=True), parameters


def make_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 2).round() / 2 if seed % 2 else logits  # with many equals


@pytest.mark.parametrize(("vocab", "seed"), [(1, 0), (50, 1), (300, 2), (5001, 3), (9001, 4)])
def test_tokens_are_those_of_the_cpu(vocab: int, seed: int) -> None:
    batch = SamplingBatch(vocab, len(WAYS) + 1)
    order = np.random.default_rng(seed).permutation(len(WAYS)) + 1  # rows of the batch, in any order
    for row, way in zip(order.tolist(), WAYS, strict=True):
        params = SamplingParams(seed=2**63 + 1000 * seed + row, max_tokens=9, **way)
        batch.add(row, params, 1, [], [0] * row)
    logits = make_logits(len(WAYS), vocab, seed)
    want = NumPyChooser(batch)(logits.clone(), order)
    got, parameters = draw(logits, batch, order.tolist())
    assert got.status.tolist() == [CHOSEN] * len(WAYS)
    assert got.tokens.tolist() == want.token_ids
    assert parameters.outputs[1:].tolist() == (batch.num_outputs[1:] + 1).tolist()


def test_more_contenders_than_are_listed_are_gone_through() -> None:
    vocab = 20000
    batch = SamplingBatch(vocab, 2)
    for row, way in enumerate(({"top_p": 0.99}, {"top_k": 19000})):
        batch.add(row, SamplingParams(seed=row, max_tokens=9, temperature=50.0, **way), 0, [], [])
    logits = make_logits(2, vocab, 0) * 0.01
    want = NumPyChooser(batch)(logits.clone(), np.arange(2))
    assert draw(logits, batch, (0, 1))[0].tokens.tolist() == want.token_ids


def test_rows_without_a_token_say_why_and_leave_the_others_alone() -> None:
    batch = SamplingBatch(5000, 6)
    for row in range(6):
        way = {"top_k": 5} if row % 2 else {}
        batch.add(row, SamplingParams(seed=row, max_tokens=9, **way), 0, [], [])
    logits = make_logits(6, 5000, 0)
    logits[0, 4999], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, :4500] = -torch.inf  # a block of banned tokens
    want = NumPyChooser(batch)(logits.clone(), np.arange(6))
    got, parameters = draw(logits, batch, range(6))
    assert got.status.tolist() == [NOT_FINITE] * 3 + [CHOSEN] * 3
    assert got.tokens.tolist() == want.token_ids
    assert parameters.outputs.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_noise_has_the_bits_of_its_definition() -> None:
    for seed, index in ((0, 0), (2**64 - 1, 7), (12345, 2**31 - 1)):
        stream = np.array([noise.stream(seed, 3)], np.uint64)
        out = torch.zeros(128, dtype=torch.int64, device=DEVICE)
        at = torch.tensor([index], dtype=torch.int32)
        hashes_of[(1,)](there(torch.from_numpy(stream.view(np.int64))), there(at), out, COUNT=128)
        want = np.empty((1, 128), np.uint32)
        noise.hash_tokens(np.arange(128, dtype=np.uint32), noise.keys(stream, np.array([index])), want, want.copy())
        assert out.tolist() == want[0].tolist()


@pytest.mark.parametrize(("vocab", "k"), [(1, 1), (50, 50), (300, 7), (5000, 0), (9001, 3)])
def test_logprobs_are_those_of_the_cpu(vocab: int, k: int) -> None:
    logits = make_logits(3, vocab, vocab)
    logits[1, vocab // 2 :] -= 200.0
    tokens = torch.tensor([0, vocab - 1, vocab // 2])
    survey = Survey.of(there(logits), there(torch.zeros(3, dtype=torch.int32)), Parameters.empty(1, DEVICE))
    got = pack_logprobs(there(logits), there(tokens), survey, k).cpu().numpy()
    rows = pack_on_host(logits.numpy(), np.arange(3), tokens.numpy(), np.full(3, k))
    want = np.stack([np.frombuffer(row, "<i4") for row in rows])
    ids = [0, 2, *range(3, want.shape[1], 2)]
    assert got[:, ids].tolist() == want[:, ids].tolist()
    reals = [1, *range(4, want.shape[1], 2)]
    np.testing.assert_allclose(got.view("<f4")[:, reals], want.view("<f4")[:, reals], rtol=1e-6, atol=1e-5)


def test_more_logprobs_than_tokens_are_refused() -> None:
    logits = there(torch.zeros(1, 5))
    survey = Survey.of(logits, there(torch.zeros(1, dtype=torch.int32)), Parameters.empty(1, DEVICE))
    with pytest.raises(ValueError, match="6 logprobs of a vocabulary of 5"):
        pack_logprobs(logits, there(torch.tensor([0])), survey, 6)


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
    parameters = EditParameters.empty(count, 8, 4, "cpu")
    for row, way in enumerate(EDITS):
        params = SamplingParams(seed=0, max_tokens=10, **way)
        border, end = int(prompts[row]), int(prompts[row] + outputs[row])
        seen = token_ids[row].tolist()
        LogitEdits(params, seen[:border], seen[border:end], vocab).apply(want[row + 1])
        parameters.repetition[row], parameters.presence[row] = params.repetition_penalty, params.presence_penalty
        parameters.frequency[row], parameters.min_tokens[row] = params.frequency_penalty, params.min_tokens
        bias, stops = params.logit_bias, list(params.stops())
        parameters.bias_count[row], parameters.ban_count[row] = len(bias), len(stops)
        parameters.bias_ids[row, : len(bias)] = torch.tensor(list(bias), dtype=torch.int32)
        parameters.biases[row, : len(bias)] = torch.tensor(list(bias.values()))
        parameters.ban_ids[row, : len(stops)] = torch.tensor(stops, dtype=torch.int32)
    places = torch.arange(1, count + 1, dtype=torch.int32)
    rows = torch.arange(-1, count, dtype=torch.int32)
    arguments = there((logits, places, rows, parameters, token_ids, prompts.int(), outputs.int()))
    edit(*arguments)
    np.testing.assert_allclose(arguments[0].cpu().numpy(), want, rtol=1e-6, atol=1e-6)
