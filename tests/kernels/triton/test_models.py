"""Whole models through the Triton kernels: logits are those of transformers, or of dequantised weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.families import load_spec
from penstock.kernels import Platform
from penstock.kernels.triton.norm import TritonNorm
from penstock.kernels.triton.weights import Scheme
from penstock.weights.load import load_parameters
from tests.checkpoints import ON_GPUS, tiny_model
from tests.kernels.device_weights import dense, pack
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.test_ops import GPU
from tests.models.logits import Checkpoint, expected_logits, kernels_on, logits_of, make_prompts

CPU = Platform("cpu", "AVX2")
ON_GPU = DEVICE.type == "cuda"
# On a GPU all of them; interpreted, those that between them have what the others have.
FAMILIES = ON_GPUS if ON_GPU else ("qwen3", "gemma3", "qwen2_moe")
PROMPTS = make_prompts() if ON_GPU else [p[:n] for p, n in zip(make_prompts()[-2:], (2, 33), strict=True)]
QUANTISED: tuple[tuple[str, Scheme], ...] = (("qwen3", "fp8"), ("qwen2_moe", "int8"), ("qwen3_moe", "int4"))
TOKENS = [11, 300, 7, 7, 150, 42, 3, 88]
# How far logits may move, of their own length: by rounding activations, which int4 leaves alone but for the head's.
BOUNDS: dict[Scheme, float] = {"fp8": 0.2, "int8": 0.1, "int4": 0.02}


@pytest.mark.parametrize("variant", FAMILIES)
def test_logits_in_fp32(variant: str, tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint(variant)
    spec, model = load_spec(folder), tiny_model(variant)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    computed = logits_of(spec, parameters, kernels_on(GPU, spec), PROMPTS, chunk=18, device=DEVICE)
    for prompt, got in zip(PROMPTS, computed, strict=True):
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
    want = logits_of(spec, unpacked, kernels_on(CPU, spec), [TOKENS])[0]
    kernels = kernels_on(GPU, spec)
    got = logits_of(spec, packed, kernels, [TOKENS], device=DEVICE)[0]
    assert 0 < (got - want).norm() < BOUNDS[scheme] * want.norm()
    norm = TritonNorm()
    by_readers = replace(kernels, rms_norm=lambda *arguments: norm(*arguments))
    assert torch.equal(got, logits_of(spec, packed, by_readers, [TOKENS], device=DEVICE)[0])
