"""A step's kernels from torch: held against the ops' references, as the Triton kernels they stand for are."""

import numpy as np
import torch

from penstock.kernels.attention import ReferenceAttention, attention_inputs, run_attention, run_store, store_inputs
from penstock.kernels.resident import EditParameters, Prepared, describe
from penstock.messages import SamplingParams
from penstock.runtime.logit_edits import LogitEdits
from penstock.runtime.step_kernels import ResidentAttention, torch_step


def test_attention_is_the_references() -> None:
    for arguments in attention_inputs(torch.float32, 0):
        torch.testing.assert_close(
            run_attention(ResidentAttention(), arguments), run_attention(ReferenceAttention(), arguments)
        )
    for arguments in store_inputs(torch.float32, 0):
        got, want = run_store(ResidentAttention(), arguments), run_store(ReferenceAttention(), arguments)
        torch.testing.assert_close(got, want)


def test_padding_attends_to_nothing_and_is_stored_nowhere() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = ResidentAttention()
    qkv = torch.randn(3, (2 + 2) * 8, generator=generator)
    pages = torch.full((4, 2, 1, 4, 8), torch.nan)
    keys, values = pages[:, 0], pages[:, 1]
    turns = attention.rotation(torch.tensor([0, 0, 0]), torch.ones(4), torch.float32)
    blocks, offsets = torch.tensor([2, -1, -1]), torch.tensor([0, 0, 0])
    query = attention.store(qkv, 2, None, turns, keys, values, blocks, offsets, 1e-6, 0.0)
    assert (~pages.isnan()).nonzero()[:, (0, 3)].unique(dim=0).tolist() == [[2, 0]]
    sequences, _ = describe(np.array([1, 1, 1]), np.arange(3), np.array([1, 0, 0]), np.array([0, -1, -1]))
    prepared = Prepared(0, torch.from_numpy(sequences), torch.tensor([[2, 0]], dtype=torch.int32), 3, 0, 0, 0)
    out = attention(query, keys, values, prepared, 1.0)
    torch.testing.assert_close(out[0], values[2, 0, :1].expand(2, -1))
    assert (out[1:] == 0).all()


def test_edits_are_the_samplers() -> None:
    vocab, prompt, output = 40, [3, 5, 5, 9], [5, 7, 7]
    params = SamplingParams(
        seed=0, max_tokens=9, min_tokens=4, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2,
        logit_bias={7: 2.0, 30: -1.0}, stop_token_ids=(1, 2),
    )  # fmt: skip
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(1))
    want = logits.clone()
    LogitEdits(params, prompt, output, vocab).apply(want[1].numpy())

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((3,), value, dtype=dtype)

    i32, f32 = torch.int32, torch.float32
    edits = EditParameters(
        column(1.3, f32),
        column(0.4, f32),
        column(-0.2, f32),
        column(2, i32),
        torch.tensor([[7, 30, 0]] * 3, dtype=i32),
        torch.tensor([[2.0, -1.0, 9.0]] * 3),
        column(2, i32),
        torch.tensor([[1, 2, 8]] * 3, dtype=i32),
        column(4, i32),
    )
    tokens = torch.zeros(3, 20, dtype=i32)
    tokens[2, :7] = torch.tensor([*prompt, *output])
    which, rows = torch.tensor([1], dtype=i32), torch.tensor([0, 2], dtype=i32)
    torch_step().edit(logits, which, rows, edits, tokens, column(4, i32), column(3, i32))
    assert torch.equal(logits, want)
    for outputs, banned in ((3, True), (4, False)):
        again = torch.zeros(2, vocab)
        torch_step().edit(again, which, rows, edits, tokens, column(4, i32), column(outputs, i32))
        assert bool(again[1, 1].isneginf()) == banned
