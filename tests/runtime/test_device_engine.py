"""An engine with device cuda generates tokens, on a MirrorDevice in place of the GPU."""

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from penstock.config import EngineConfig
from penstock.engine.inprocess import start_thread
from penstock.engine.main import EngineBackend, model_eos
from penstock.engine.ranks.local import LocalRanks
from penstock.engine.ranks.workers import WorkersExecutor
from penstock.messages import EngineClient, EngineError, GenerateRequest, SamplingParams
from penstock.runtime.loading import gpu as load_device
from penstock.runtime.runner import ModelRunner
from tests.runtime.loading.test_load_device import SPECULATION, Memory, config
from tests.runtime.mirror_device import load_mirror

Checkpoint = Callable[..., Path]


async def written(client: EngineClient) -> list[list[int]]:
    """Returns the tokens of requests that are sent at the same time."""

    async def one(index: int) -> list[int]:
        sampling = SamplingParams(seed=index, max_tokens=6 + index, temperature=float(index % 2))
        prompt = tuple(range(3, 20 + 9 * index))
        request = GenerateRequest(request_id=str(index), prompt_ids=prompt, sampling=sampling)
        return [token async for delta in client.generate(request) for token in delta.token_ids]

    try:
        return await asyncio.gather(*map(one, range(6)))
    finally:
        await client.close()


async def test_an_engine_with_two_plans_outstanding_writes_what_a_cpus_does(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runners: list[ModelRunner] = []

    def load_here(settings: EngineConfig, *, progress: bool) -> ModelRunner:
        runners.append(load_mirror(settings, Memory(), progress=progress))
        return runners[-1]

    monkeypatch.setattr(load_device, "load_gpu_runner", load_here)
    settings = config(tiny_checkpoint("qwen3"))
    got = await written(await start_thread(settings))
    assert len(runners) == 1 and runners[0].capacity.depth == 2
    host = replace(settings, device="cpu", depth=1, kv_cache_bytes=8 << 20, threads=1)
    assert got == await written(await start_thread(host))
    assert [len(tokens) for tokens in got] == [6, 7, 8, 9, 10, 11]
    for deterministic in (False, True):
        caplog.clear()
        drafting = replace(settings, deterministic=deterministic, **SPECULATION)
        assert got == await written(await start_thread(drafting))
        assert runners[-1].capacity.depth == 1
        (warned,) = [text for text in caplog.messages if "never measured on a GPU" in text]
        assert ("without --deterministic" in warned) != deterministic


def ranks_here(config: EngineConfig) -> LocalRanks:
    return LocalRanks(config.split.world, (sys.executable, "-m", "tests.runtime.mesh.device_rank"))


async def test_an_engine_of_ranks_on_devices_writes_what_one_on_a_cpu_does(tiny_checkpoint: Checkpoint) -> None:
    """Each rank is a process that measures its own memory; all get as many KV blocks as the smallest one."""
    settings = config(tiny_checkpoint("qwen3"), max_num_seqs=2)
    backend = EngineBackend(partial(WorkersExecutor, ranks=ranks_here), model_eos)
    client = await start_thread(replace(settings, tensor_parallel_size=2), backend)
    memory = {row.name: row.bytes for row in client.info.memory}
    assert memory["KV cache"] > 0
    got = await written(client)
    host = replace(settings, device="cpu", depth=1, kv_cache_bytes=8 << 20, threads=1)
    assert got == await written(await start_thread(host))


async def test_an_engine_without_its_gpu_says_so_in_one_line(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update it")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(EngineError) as caught:
        await start_thread(config(tiny_checkpoint("qwen3")))
    assert "torch finds no GPU: The NVIDIA driver on your system is too old (found version 11040); set" in str(
        caught.value
    )
    assert "\n" not in str(caught.value)
