"""An engine with a real model: the one that Penstock brings along."""

import asyncio
import shutil
from pathlib import Path

import pytest

from penstock.config.engine import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import EngineError, GenerateRequest, SamplingParams, unpack_rows
from penstock.weights.packaged import embedded_model
from tests.engine.simulated import Answer, ask

MODEL = embedded_model()
PROMPTS = [(5, 9, 300, 17), tuple(range(40, 100)), (1000,)]


def config(model: Path = MODEL) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        name="python-8m",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        kv_cache_bytes=16 << 20,
        threads=1,
    )


async def answers(in_process: bool) -> list[Answer]:
    client = await launch(config(), in_process=in_process)
    try:
        assert client.info.vocab_size > 1000
        sampling = SamplingParams(seed=0, max_tokens=12, temperature=0.0, logprobs=2, ignore_eos=True)
        requests = [
            GenerateRequest(request_id=f"r{i}", prompt_ids=ids, sampling=sampling) for i, ids in enumerate(PROMPTS)
        ]
        given = await asyncio.gather(*(ask(client, request) for request in requests))
        assert client.stats().forward_seconds > 0
        return given
    finally:
        await client.close()


async def test_a_thread_and_a_process_say_the_same() -> None:
    here, there = await answers(True), await answers(False)
    assert [len(answer.choices[0]) for answer in here] == [12, 12, 12]
    for one, other in zip(here, there, strict=True):
        for row, same in zip(unpack_rows(one.logprobs[0], 2), unpack_rows(other.logprobs[0], 2), strict=True):
            # Not bit for bit: which requests shared a step depends on when they arrived, and torch's sums on that.
            assert row.logprob == pytest.approx(same.logprob, abs=1e-4)
            if row.top[0][1] - row.top[1][1] < 1e-4:
                break  # either token is right here, and the rest follows from it
            assert row.token_id == same.token_id


@pytest.mark.parametrize("in_process", [True, False])
async def test_a_folder_without_a_model_is_told(tmp_path: Path, in_process: bool) -> None:
    with pytest.raises(EngineError) as caught:
        await launch(config(tmp_path), in_process=in_process)
    assert str(caught.value) == (
        f"{tmp_path} is not a model's folder: it has no config.json; it is empty: download the model into it, or check "
        "the path"
    )


async def test_a_truncated_checkpoint_is_told_in_a_line(tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(EngineError, match=r"model\.safetensors") as caught:
        await launch(config(model))
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
