"""Loads CPU runners: their capacity, their settings, and the cache root that identifies their KV."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors import safe_open

from penstock.config import DoesNotFit, EngineConfig
from penstock.messages import NewSequence, SamplingParams, StepPlan, Window, Work
from penstock.runtime.loading.load import load_runner

Checkpoint = Callable[..., Path]


def config(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder), name="tiny", max_model_len=128, max_num_seqs=4, kv_cache_bytes=8 << 20, threads=1
    )


def test_capacity_and_a_first_step(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint("gemma3", dtype="bfloat16")
    runner = load_runner(config(folder), progress=False)
    capacity = runner.capacity
    assert capacity.block_size == 16 and capacity.depth == 1 and capacity.vocab_size == 307
    assert [group.window for group in capacity.groups] == [Window(), Window(16)]
    rows = {row.name: row.bytes for row in capacity.memory}
    with safe_open(folder / "model.safetensors", "pt") as stored:
        assert rows["weights"] >= sum(2 * stored.get_tensor(name).numel() for name in stored.keys())  # noqa: SIM118
    assert rows["KV cache"] == runner.pages.bytes <= 8 << 20
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    new = tuple(NewSequence(i, (5, 6, 7), 3, 0, ((1 + i,), (1 + i,)), sampling, 0) for i in range(4))
    result = runner.execute(StepPlan(1, tuple(Work(i, 3, True) for i in range(4)), new))
    assert len({r.token_ids for r in result.results}) == 1 and len(result.results[0].token_ids) == 1
    runner.close()


@pytest.mark.parametrize(("length", "block_size"), [(1, 16), (16, 16), (3, 1)])
def test_a_context_of_a_block_or_less_is_loaded(tiny_checkpoint: Checkpoint, length: int, block_size: int) -> None:
    short = replace(config(tiny_checkpoint("gemma3")), max_model_len=length, block_size=block_size)
    runner = load_runner(short, progress=False)
    assert runner.capacity.groups[0].num_blocks > -(-length // block_size)
    runner.close()


def test_the_identity_tells_weights_types_and_layouts_apart(tiny_checkpoint: Checkpoint) -> None:
    base = config(tiny_checkpoint("qwen3"))
    variants = [
        base,
        replace(base, dtype="float32"),
        replace(base, block_size=8),
        replace(base, model=str(tiny_checkpoint("qwen3", seed=1))),
    ]
    found = [load_runner(variant, progress=False).capacity.identity for variant in variants]
    assert len(set(found)) == len(found)
    assert found[0] == load_runner(base, progress=False).capacity.identity
    assert set(json.loads(found[0].numerics)) == {"weights", "kv", "machine"}
    # The same model however it is stored, and another one.
    assert [each.weights == found[0].weights for each in found] == [True, True, True, False]


def test_threads_are_those_asked_for(tiny_checkpoint: Checkpoint) -> None:
    before = torch.get_num_threads()
    try:
        load_runner(config(tiny_checkpoint("qwen3")), progress=False)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused_before_weights_are_read(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_checkpoint("qwen3") / "config.json").read_text())
    with pytest.raises(DoesNotFit, match="--kv-cache-memory"):
        load_runner(replace(config(tmp_path), kv_cache_bytes=1 << 10), progress=False)
