"""Two ranks on two GPUs, over NCCL and in captured steps, write what one does. Skipped where there are fewer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from penstock.engine.inprocess import start_thread
from tests.runtime.loading.test_load_device import config
from tests.runtime.test_device_engine import written

Checkpoint = Callable[..., Path]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two
@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"enforce_eager": True}], ids=str)
@pytest.mark.parametrize(
    ("variant", "split"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("qwen2_moe", {"tensor_parallel_size": 2, "expert_parallel": True}),
        ("gemma3", {"pipeline_parallel_size": 2}),
    ],
    ids=str,
)
async def test_two_gpus_write_what_one_does(
    variant: str, split: dict[str, object], settings: dict[str, object], tiny_checkpoint: Checkpoint
) -> None:
    one = config(tiny_checkpoint(variant), **settings)
    expected = await written(await start_thread(one))
    assert await written(await start_thread(replace(one, **split))) == expected
