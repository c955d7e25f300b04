"""What is done for a model while torch is imported."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from penstock.config import DoesNotFit, EngineConfig
from penstock.kernels import Needs, Platform, detect_platform, select_packing
from penstock.messages import NewSequence, SamplingParams, StepPlan, StepResult, Work
from penstock.runtime import groundwork
from penstock.runtime.groundwork import Groundwork
from penstock.runtime.load import load_runner
from penstock.runtime.runner import ModelRunner
from tests.weights.peak_memory import anonymous_mib

Checkpoint = Callable[..., Path]


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
    code = "import penstock.runtime.groundwork, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_runner_upon_it_is_the_one_without(tiny_checkpoint: Checkpoint, quantization: str) -> None:
    if quantization != "none" and not detect_platform().isa:
        pytest.skip("no native kernels")
    settings = replace(config(tiny_checkpoint("qwen3", dtype="bfloat16")), quantization=quantization)
    laid = Groundwork(settings)
    upon, without = load_runner(settings, laid, progress=False), load_runner(settings, progress=False)
    assert upon.capacity.groups == without.capacity.groups
    assert upon.capacity.cache_root == without.capacity.cache_root
    assert step(upon).results == step(without).results
    with pytest.raises(RuntimeError, match="taken already"):
        laid.weights()


def test_memory_becomes_resident_by_itself_until_it_is_asked_for(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groundwork, "weights_bytes", lambda facts, engine: 192 << 20)
    before = anonymous_mib()
    laid = Groundwork(config(tiny_checkpoint("qwen3")))
    end = time.monotonic() + 30
    while anonymous_mib() < before + 180:
        assert time.monotonic() < end, "the memory did not become resident"
        time.sleep(0.01)
    assert len(laid.weights()) >= 192 << 20
    monkeypatch.setattr(groundwork, "STEP", groundwork.PAGE)  # the next one is asked at once: it stops where it is
    before = anonymous_mib()
    memory = Groundwork(config(tiny_checkpoint("qwen3"))).weights()
    assert anonymous_mib() < before + 96
    assert len(memory) >= 192 << 20


def test_what_does_not_fit_takes_no_memory(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(DoesNotFit, match="--kv-cache-memory"):
        Groundwork(replace(config(tiny_checkpoint("qwen3")), kv_cache_bytes=1 << 10))


@pytest.mark.parametrize("platform", [detect_platform(), Platform("cpu", "AVX2", False)], ids=["native", "torch"])
def test_weights_are_put_where_there_is_room(platform: Platform) -> None:
    memory = np.empty(40 << 10, np.uint8)
    packing = select_packing(platform, Needs(torch.bfloat16), memory=memory)
    rows = torch.arange(64 * 128, dtype=torch.bfloat16).view(64, 128)
    places = []
    for _ in range(3):  # of 16 KiB each: two find room
        packer = packing((64, 128), "matrix")
        packer.put(0, rows.clone())
        weight = packer.finish()
        places.append((weight if isinstance(weight, torch.Tensor) else weight.lines).data_ptr() - memory.ctypes.data)
    assert all(0 <= place <= 24 << 10 for place in places[:2]) and not 0 <= places[2] < len(memory)
