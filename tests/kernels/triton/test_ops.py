"""The Triton provider of every op against the op's reference, and what it takes to choose it."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.kernels import Needs, Platform, select_kernels
from tests.kernels.op_cases import OPS, OpCase
from tests.kernels.triton.device import there

GPU = Platform("cuda", "9.0")
LARGEST_REPEATED = 30  # rows of the inputs that are tried in every dtype: interpreting the larger takes seconds
# Torch's own kernels. A GPU refuses models with states or latents, which need most; encoders run there in torch.
IN_TORCH = ("layer_norm", "product", "recurrence", "sigmoid_gate", "bidirectional_attention")
IN_TORCH += ("linear_by_head", "store_latents", "latent_attention", "ungated_experts")
CASES = [
    pytest.param(op, dtype, id=f"{op.name}-{str(dtype)[6:]}", marks=marks)
    for op in OPS
    if op.name not in IN_TORCH
    for dtype, marks in ((torch.bfloat16, ()), (torch.float32, ()), (torch.float16, pytest.mark.rare))
]


def inputs(op: OpCase, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for arguments in op.inputs(dtype, 0):
        if dtype == torch.bfloat16 or len(arguments[0]) <= LARGEST_REPEATED:
            yield arguments


def tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_provider_agrees_with_the_reference(op: OpCase, dtype: torch.dtype) -> None:
    provider = op.select(GPU, Needs(dtype))
    assert provider.name == "triton", "in torch: see IN_TORCH"
    tried = 0
    for arguments in inputs(op, dtype):
        expected = tensors(op.run(op.reference.make(), arguments))
        for got, want in zip(tensors(op.run(provider.make(), there(arguments))), expected, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            largest = want.abs().max().item() if want.numel() else 0.0
            torch.testing.assert_close(got.cpu(), want, rtol=0.0, atol=op.tolerance[dtype] * max(largest, 1.0))
            tried += 1
    assert tried


def test_a_gpu_gets_the_triton_kernels_and_a_cpu_does_not() -> None:
    assert "paged_attention=triton" in select_kernels(GPU, Needs(torch.bfloat16)).fingerprint
    assert "triton" not in select_kernels(Platform("cpu", "AVX2"), Needs(torch.bfloat16)).fingerprint


def test_only_making_a_provider_imports_triton() -> None:
    said = subprocess.run(
        [sys.executable, "-c", "import sys, penstock.kernels; print('triton' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == "False"
