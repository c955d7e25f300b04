"""Whole models through the Triton kernels, interpreted: logits are those of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import tiny_model
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.test_ops import GPU
from tests.models import test_fidelity

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the model's tensors are on the CPU here")


@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "qwen2_moe"])
def test_logits_in_fp32(variant: str, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_fidelity, "detect_platform", lambda: GPU)
    model, prompts = (
        tiny_model(variant),
        [prompt[:length] for prompt, length in zip(test_fidelity.make_prompts()[-3:], (2, 19, 33), strict=True)],
    )
    chunks = test_fidelity.our_logits(tiny_checkpoint(variant), "float32", prompts, 18)
    for prompt, got in zip(prompts, chunks, strict=True):
        want = test_fidelity.expected_logits(model, prompt)
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-4)
