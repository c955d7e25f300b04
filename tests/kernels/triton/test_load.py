"""A checkpoint loaded as the engine loads it, with the Triton kernels: on a GPU by all of the GPU's way, with streams,
pinned memory, what the device says of its memory and graphs; interpreted elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from penstock.config import EngineConfig
from penstock.config.weights import weights_bytes
from penstock.families import load_spec, model_facts
from penstock.kernels import detect_platform, packers
from penstock.messages import NewSequence, SamplingParams, StepPlan, Work
from penstock.messages.logprobs import unpack_rows
from penstock.runtime.loading import gpu as load_device
from penstock.runtime.loading.cpu import load_cpu_runner
from penstock.runtime.loading.gpu import load_device_runner
from penstock.runtime.loading.load import load_runner
from penstock.runtime.runner import ModelRunner
from penstock.runtime.step_kernels import triton_step
from tests import gguf_models
from tests.gguf.blocks import HALVES
from tests.gguf.blocks import random_rows as rows_of_any_scale
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.test_ops import GPU
from tests.runtime.loading.test_load_device import Memory
from tests.runtime.mirror_device import device_at
from tests.weights.gguf_values import write_model

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

# As in a Q4_K_M file, whose types have halves and bytes, groups of 32 and 16, and minima; and a table.
MIXED = dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), "Q4_K")
MIXED |= {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "IQ4_XS", "token_embd.weight": "Q6_K"}
SCALES = {"Q4_K": (1e-3, 7.5e-3), "Q6_K": (1e-4,), "IQ4_XS": (1e-4,)}  # values are then below 1


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


def moderate_rows(dtype: str, rows: int, k: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Random rows of moderate scales."""
    data = rows_of_any_scale(dtype, rows, k, seed=seed)
    blocks = data.reshape(rows * k // 256, -1)
    for place, scale in zip(HALVES.get(dtype, (0,)), SCALES[dtype], strict=True):
        blocks[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return data


@pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
def test_a_gguf_file_stays_codes_and_says_what_it_says_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_models, "random_rows", moderate_rows)
    path = write_model(tmp_path, "llama", MIXED, tie_word_embeddings=True)
    settings = EngineConfig(
        model=str(path),
        name="tiny",
        device="cuda",
        depth=2,
        dtype="bfloat16",
        max_model_len=16,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        kv_cache_bytes=1 << 20,
        enforce_eager=True,
    )
    facts, prompt, said = model_facts(load_spec(path)), (11, 300, 7, 150, 42, 3), []
    for kept in (facts, facts.without_codes()):
        if kept is not facts:  # as on a machine that has no native code to decode them
            for module in (packers, load_device):
                monkeypatch.setattr(module, "instruction_sets", lambda: ())
        runner = loaded(settings, monkeypatch)
        assert runner.model.nbytes == weights_bytes(kept, settings)
        said.append(likeliest(runner, prompt))
        runner.close()
    assert len(said[0] & said[1]) >= 4, said
    assert weights_bytes(facts, settings) < 0.42 * weights_bytes(facts.without_codes(), settings)
