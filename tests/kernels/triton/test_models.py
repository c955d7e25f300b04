"""Whole models through the Triton kernels: logits are those of transformers, or of dequantised weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.families import ModelSpec, load_spec
from penstock.kernels import Kernels, Needs, Platform, select_kernels
from penstock.kernels.triton.norm import TritonNorm
from penstock.kernels.triton.weights import Scheme, dense, pack
from penstock.messages import NewSequence, SamplingParams
from penstock.models import Decoder
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.inputs import StepInputs, segments
from penstock.runtime.pages import KVPages
from penstock.weights.load import load_parameters
from tests.checkpoints import VARIANTS, tiny_model
from tests.kernels.triton.device import DEVICE, there
from tests.kernels.triton.test_ops import GPU
from tests.models.test_fidelity import expected_logits, make_prompts

Checkpoint = Callable[..., Path]
CPU = Platform("cpu", "AVX2", False)
ON_GPU = DEVICE.type == "cuda"
# On a GPU all of them; interpreted, those that between them have what the others have.
FAMILIES = tuple(VARIANTS) if ON_GPU else ("qwen3", "gemma3", "qwen2_moe")
PROMPTS = make_prompts() if ON_GPU else [p[:n] for p, n in zip(make_prompts()[-2:], (2, 33), strict=True)]
QUANTISED: tuple[tuple[str, Scheme], ...] = (("qwen3", "fp8"), ("qwen2_moe", "int8"), ("qwen3_moe", "int4"))
TOKENS = [11, 300, 7, 7, 150, 42, 3, 88]
# How far logits may move, of their own length: by rounding activations, which int4 leaves alone but for the head's.
BOUNDS: dict[Scheme, float] = {"fp8": 0.2, "int8": 0.1, "int4": 0.02}
BLOCK_SIZE = 16


def kernels_on(platform: Platform, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Kernels:
    head_dims = tuple(layer.head_dim for layer in spec.layers)
    return select_kernels(platform, Needs(dtype, BLOCK_SIZE, head_dims))


def _stay(value: Any) -> Any:
    return value


@torch.inference_mode()
def logits_of(
    spec: ModelSpec,
    parameters: Mapping[str, Any],
    kernels: Kernels,
    prompts: Sequence[Sequence[int]],
    *,
    chunk: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device = DEVICE,
) -> list[Tensor]:
    """After every token, computed on the device in steps of at most `chunk` tokens of each prompt, all side by side."""
    move = there if device.type == DEVICE.type else _stay
    decoder = Decoder(spec, {name: move(value) for name, value in parameters.items()}, kernels)
    each, groups = -(-max(map(len, prompts)) // BLOCK_SIZE), len(spec.windows)
    pages = KVPages(spec, [1 + len(prompts) * each] * groups, BLOCK_SIZE, dtype, device=device)
    batch = PersistentBatch(len(prompts), each * BLOCK_SIZE, BLOCK_SIZE, groups)
    for i, prompt in enumerate(prompts):
        table = tuple(1 + len(prompts) * block + i for block in range(each))
        for group in range(groups):
            pages.clear(group, table)
        sampling = SamplingParams(seed=0, max_tokens=1)
        batch.add(NewSequence(i, tuple(prompt), len(prompt), 0, (table,) * groups, sampling, 0))
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while left := [i for i, prompt in enumerate(prompts) if batch.num_computed[batch.row(i)] < len(prompt)]:
        rows = [batch.row(i) for i in left]
        counts = [min(chunk, len(prompts[i]) - int(batch.num_computed[row])) for i, row in zip(left, rows, strict=True)]
        units = segments(batch, rows, counts, [False] * len(rows))
        step = StepInputs(batch, spec.windows, units.tokens).fill(
            units, lambda group, seen: kernels.attention.prepare(seen, pages.group_keys(group))
        )
        computed = decoder.logits(decoder.forward(move(step), pages.layers))
        for i, part in zip(left, computed.cpu().split(counts), strict=True):
            logits[i].append(part)
        batch.num_computed[rows] += counts
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_in_fp32(variant: str, tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint(variant)
    spec, model = load_spec(folder), tiny_model(variant)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    for prompt, got in zip(PROMPTS, logits_of(spec, parameters, kernels_on(GPU, spec), PROMPTS, chunk=18), strict=True):
        torch.testing.assert_close(got, expected_logits(model, prompt), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize(("variant", "scheme"), QUANTISED)
def test_quantised_logits_are_those_of_the_dequantised_weights(
    variant: str, scheme: Scheme, tiny_checkpoint: Checkpoint
) -> None:
    """But for what rounding activations to eight bits moves; which norms do as their readers would."""
    folder = tiny_checkpoint(variant)
    spec = load_spec(folder)
    parameters: dict[str, Any] = load_parameters(folder, spec, torch.float32, progress=False)
    packed, unpacked = dict(parameters), dict(parameters)
    for p in spec.parameters:
        if p.kind not in ("vector", "router"):
            kept: Scheme = "int8" if p.kind == "vocabulary" and scheme == "int4" else scheme
            packed[p.name] = pack(parameters[p.name], kept)
            unpacked[p.name] = dense(packed[p.name])
    want = logits_of(spec, unpacked, kernels_on(CPU, spec), [TOKENS], device=torch.device("cpu"))[0]
    kernels = kernels_on(GPU, spec)
    got = logits_of(spec, packed, kernels, [TOKENS])[0]
    assert 0 < (got - want).norm() < BOUNDS[scheme] * want.norm()
    norm = TritonNorm()
    by_readers = replace(kernels, rms_norm=lambda *arguments: norm(*arguments))
    assert torch.equal(got, logits_of(spec, packed, by_readers, [TOKENS])[0])
