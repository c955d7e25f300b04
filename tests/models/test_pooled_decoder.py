"""Decoders that pool, as Qwen3-Embedding does, against transformers: in chunks, after a prefix hit, in any company."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.families import UnsupportedModel, load_spec
from penstock.messages import GenerateRequest, PoolingParams, RequestRejected, SamplingParams
from tests.checkpoints import tiny_model

LENGTHS = (1, 200, 17, 90, 3, 33)


def write(folder: Path, mode: str, *, headless: bool = True, normalize: bool = True) -> Any:
    """Qwen3-Embedding's layout: the decoder without its head, and the files of sentence-transformers."""
    model = tiny_model("qwen3").eval()
    kept = model.model if headless else model
    kept.save_pretrained(folder)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    (folder / "modules.json").write_text(
        json.dumps(
            [{"type": f"sentence_transformers.models.{m}", "path": "" if m == "Transformer" else m} for m in modules]
        )
    )
    (folder / "Pooling").mkdir()
    (folder / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode": mode}))
    return model


def expected(model: Any, ids: Sequence[int], mode: str, *, normalize: bool = True) -> np.ndarray:
    with torch.inference_mode():
        states = model.model(torch.tensor([list(ids)])).last_hidden_state[0]
    row = states[-1] if mode == "lasttoken" else states.mean(0)
    return (row / row.norm() if normalize else row).numpy()


async def vectors(folder: Path, prompts: Sequence[Sequence[int]], **changes: Any) -> tuple[np.ndarray, int]:
    """The vectors of prompts sent together, twice, and the tokens that the prefix cache had of the second."""
    config = EngineConfig(
        model=str(folder),
        name="decoder",
        device="cpu",
        **{
            "dtype": "float32",
            "max_model_len": 200,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 200,
            "kv_cache_bytes": 4 << 20,
            "threads": 1,
            **changes,
        },
    )
    client = await launch(config, in_process=True)
    try:

        async def one(name: str, ids: Sequence[int]) -> tuple[np.ndarray, int]:
            request = GenerateRequest(
                request_id=name,
                prompt_ids=tuple(ids),
                sampling=SamplingParams(seed=0, max_tokens=1),
                pooling=PoolingParams(),
            )
            (delta,) = [delta async for delta in client.generate(request)]
            assert delta.finish_reason == "stop" and not delta.token_ids and not delta.error
            return np.frombuffer(delta.pooled, np.float32), delta.cached_tokens

        first = await asyncio.gather(*(one(f"a{i}", ids) for i, ids in enumerate(prompts)))
        second = await asyncio.gather(*(one(f"b{i}", ids) for i, ids in enumerate(prompts)))
        tokens = GenerateRequest(request_id="c", prompt_ids=(1,), sampling=SamplingParams(seed=0, max_tokens=1))
        with pytest.raises(RequestRejected, match="gives vectors"):
            await anext(aiter(client.generate(tokens)))
        stats = client.stats()
        assert stats.blocks_held == (0,), "KV pages are free again"
    finally:
        await client.close()
    found = np.stack([row for row, _ in first])
    assert np.abs(found - np.stack([row for row, _ in second])).max() < 1e-6
    return found, sum(cached for _, cached in second)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 307, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("headless", [True, False])
@pytest.mark.parametrize("tokens", [200, 32])
def test_the_last_token(prompts: list[list[int]], tokens: int, headless: bool, tmp_path: Path) -> None:
    """With 32 tokens a step, prompts are computed in chunks. The longest has max_model_len tokens."""
    model = write(tmp_path, "lasttoken", headless=headless)
    found, cached = asyncio.run(vectors(tmp_path, prompts, max_num_batched_tokens=tokens))
    wanted = np.stack([expected(model, ids, "lasttoken") for ids in prompts])
    assert np.abs(found - wanted).max() < 1e-5
    assert found.std(0).mean() > 0.05 and cached > 200


def test_the_mean_is_of_whole_texts(prompts: list[list[int]], tmp_path: Path) -> None:
    model = write(tmp_path, "mean", normalize=False)
    found, cached = asyncio.run(vectors(tmp_path, prompts))
    wanted = np.stack([expected(model, ids, "mean", normalize=False) for ids in prompts])
    assert np.abs(found - wanted).max() < 1e-5 and cached == 0
    assert np.abs(wanted - [expected(model, ids, "lasttoken", normalize=False) for ids in prompts]).max() > 0.1


def test_without_a_head_and_modules_it_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "lasttoken")
    (tmp_path / "modules.json").unlink()
    with pytest.raises(UnsupportedModel, match="says how it pools"):
        load_spec(tmp_path)
