"""Preload sizes memory and reads weights while torch is imported."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from penstock.config import DoesNotFit, EngineConfig
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels import detect_platform
from penstock.messages import NewSequence, SamplingParams, StepPlan, StepResult, Work
from penstock.runtime.loading import preload
from penstock.runtime.loading.load import load_runner
from penstock.runtime.loading.preload import Preload
from penstock.runtime.runner import ModelRunner
from penstock.weights.matrices import MatrixReader
from tests.engine.processes import descriptors
from tests.patience import wait_for

Checkpoint = Callable[..., Path]
needs_native = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), name="tiny", max_model_len=64, max_num_seqs=2, kv_cache_bytes=8 << 20, threads=1
    )


def step(runner: ModelRunner) -> StepResult:
    blocks = tuple((1,) for _ in runner.capacity.groups)
    new = NewSequence(1, (5, 6, 7), 3, 0, blocks, SamplingParams(seed=0, max_tokens=1, logprobs=3), 0)
    result = runner.execute(StepPlan(1, (Work(1, 3, True),), (new,)))
    assert result is not None
    return result


def test_it_needs_no_torch() -> None:
    code = "import penstock.runtime.loading.preload, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_runner_upon_it_is_the_one_without(tiny_checkpoint: Checkpoint, quantization: str) -> None:
    if quantization != "none" and not detect_platform().isa:
        pytest.skip("no native kernels")
    settings = replace(config(tiny_checkpoint("qwen3", dtype="bfloat16")), quantization=quantization)
    laid = Preload(settings)
    upon, without = load_runner(settings, laid, progress=False), load_runner(settings, progress=False)
    assert upon.capacity.groups == without.capacity.groups
    assert upon.capacity.identity == without.capacity.identity
    assert step(upon).results == step(without).results


@needs_native
def test_weights_are_read_by_themselves(tiny_checkpoint: Checkpoint) -> None:
    """Weights are read without the interpreter, so also while it imports."""
    laid = Preload(config(tiny_checkpoint("qwen3")))
    assert laid.matrices is not None
    want = Preload(config(tiny_checkpoint("qwen3"))).matrices
    assert want is not None
    want.finish(lambda count: None)
    wait_for(lambda: same_bits(laid.matrices, want), "the weights")
    laid.matrices.close()


def same_bits(one: MatrixReader, other: MatrixReader) -> bool:
    return all(
        torch.equal(x.view(-1).view(torch.uint8), y.view(-1).view(torch.uint8))
        for name, packer in one.packers.items()
        for x, y in zip(packer.finish().tensors, other.packers[name].finish().tensors, strict=True)
    )


def test_where_there_are_no_native_kernels_nothing_is_read_before(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Preload(replace(config(tiny_checkpoint("qwen3")), dtype="float16")).matrices is None
    monkeypatch.setattr(preload, "instruction_sets", tuple)
    assert Preload(config(tiny_checkpoint("qwen3"))).matrices is None


def test_a_broken_checkpoint_is_refused_before_torch_is_imported(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_checkpoint("qwen3"), tmp_path / "broken")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    before = descriptors()
    with pytest.raises(CheckpointError, match="truncated"):
        Preload(config(folder))
    assert descriptors() == before


def test_what_does_not_fit_takes_no_memory(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(DoesNotFit, match="--kv-cache-memory"):
        Preload(replace(config(tiny_checkpoint("qwen3")), kv_cache_bytes=1 << 10))
