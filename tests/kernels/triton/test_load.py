"""A checkpoint loaded as the engine loads it, with the Triton kernels: on a GPU by all of the GPU's way, with streams,
pinned memory, what the device says of its memory and graphs; interpreted elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.messages import NewSequence, SamplingParams, StepPlan, Work
from penstock.messages.logprobs import unpack_rows
from penstock.runtime.loading import gpu as load_device
from penstock.runtime.loading.cpu import load_cpu_runner
from penstock.runtime.loading.gpu import load_device_runner
from penstock.runtime.loading.load import load_runner
from penstock.runtime.runner import ModelRunner
from penstock.runtime.step_kernels import triton_step
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.test_ops import GPU
from tests.runtime.loading.test_load_device import Memory
from tests.runtime.mirror_device import device_at

Checkpoint = Callable[..., Path]
INTERPRETED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("qwen3", {"quantization": "fp8", "kv_cache_dtype": "fp8", "enforce_eager": True}),
    ("llama_bias", {"quantization": "int4", "deterministic": True, "enforce_eager": True}),
)
ON_GPU: tuple[tuple[str, dict[str, Any]], ...] = (  # with graphs, too
    ("qwen3", {}),
    ("qwen3", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    ("llama_bias", {"quantization": "int4", "deterministic": True, "enforce_eager": True}),
)
CASES = INTERPRETED if DEVICE.type == "cpu" else ON_GPU


def loaded(settings: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    if DEVICE.type == "cuda":
        return load_runner(settings, progress=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "interpreter")
    monkeypatch.setattr(load_device, "warm_up_all_sizes", lambda runner, config: None)  # it would take minutes
    return load_device_runner(settings, device_at(DEVICE), GPU, Memory(), step_kernels=triton_step(), progress=False)


def likeliest(runner: Any, tokens: tuple[int, ...]) -> set[int]:
    """The five likeliest tokens to follow."""
    greedy = SamplingParams(seed=0, max_tokens=1, temperature=0.0, logprobs=5)
    new = NewSequence(1, tokens, len(tokens), 0, ((1,),) * len(runner.capacity.groups), greedy, 0)
    (result,) = runner.execute(StepPlan(1, (Work(1, len(tokens), True),), (new,))).results
    assert not result.error
    (row,) = unpack_rows(result.logprobs, 5)
    return {token for token, _ in row.top}


@pytest.mark.parametrize(("variant", "changes"), CASES)
def test_a_loaded_checkpoint_says_what_it_says_on_a_cpu(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, variant: str, changes: dict[str, Any]
) -> None:
    settings = EngineConfig(
        model=str(tiny_checkpoint(variant)),
        name="tiny",
        device="cuda",
        depth=2,
        dtype="float32",
        max_model_len=16,
        max_num_seqs=1 if DEVICE.type == "cpu" else 8,
        max_num_batched_tokens=8,
        kv_cache_bytes=1 << 20,
        **changes,
    )
    runner = loaded(settings, monkeypatch)
    assert runner.capacity.depth == 2 and runner.capacity.memory[0].bytes > 0
    plain = replace(settings, device="cpu", depth=1, threads=1, quantization="none", kv_cache_dtype="auto")
    prompt = (11, 300, 7, 150, 42, 3)
    got, want = likeliest(runner, prompt), likeliest(load_cpu_runner(plain, progress=False), prompt)
    assert len(got & want) >= (3 if settings.quantization != "none" else 5), (got, want)
    runner.close()
