"""Models whose layers keep states: what a sequence gives depends neither on its batch nor on its past in the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config import EngineConfig, Split
from penstock.families import CannotSplit, load_spec, model_facts, shard
from penstock.kernels import detect_platform
from penstock.messages import GenerateRequest, SamplingParams
from penstock.runtime.loading.load import load_runner
from penstock.weights.load import load_parameters
from tests.gguf_models import write_gguf
from tests.models.logits import Checkpoint, kernels_on, logits_of, make_prompts
from tests.models.serving import Server, make_runner, outputs

VARIANT = "qwen3_next"


def requests(choices: int = 1, temperature: float = 1.0) -> list[GenerateRequest]:
    sampling = SamplingParams(seed=0, max_tokens=24, temperature=temperature, ignore_eos=True)
    return [
        GenerateRequest(request_id=str(i), prompt_ids=tuple(prompt), sampling=sampling, n=choices)
        for i, prompt in enumerate(make_prompts(seed=3))
    ]


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint(VARIANT)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[tuple[str, int], list[int]]:
    """The tokens of each request when it is served by itself."""
    server = Server(make_runner(folder))
    return {key: tokens for each in requests() for key, tokens in outputs(server.run([each])).items()}


def test_tokens_do_not_depend_on_the_batch_chunks_or_preemption(folder: Path, alone: dict[Any, list[int]]) -> None:
    for settings in ({}, {"budget": 21}, {"blocks": 12, "budget": 45}):
        server = Server(make_runner(folder), **settings)
        assert outputs(server.run(requests())) == alone
        assert bool(server.scheduler.stats().preemptions) == ("blocks" in settings)


@pytest.mark.parametrize("variant", [VARIANT, "nemotron_h_moe", "nemotron_h_latent"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_to_the_bit_alone_and_in_any_chunk(
    dtype: str, variant: str, tiny_checkpoint: Checkpoint
) -> None:
    if not (platform := detect_platform()).isa:
        pytest.skip("no native kernels for this machine")
    where, prompts, kind = tiny_checkpoint(variant, dtype=dtype), make_prompts(), getattr(torch, dtype)
    spec = load_spec(where)
    parameters, kernels = load_parameters(where, spec, kind, progress=False), kernels_on(platform, spec, kind)
    whole = logits_of(spec, parameters, kernels, prompts, dtype=kind)
    for chunk in (1, 7):
        assert all(map(torch.equal, whole, logits_of(spec, parameters, kernels, prompts, chunk=chunk, dtype=kind)))
    for logits, prompt in zip(whole[-3:], prompts[-3:], strict=True):
        assert torch.equal(logits, logits_of(spec, parameters, kernels, [prompt], chunk=5, dtype=kind)[0])


@pytest.mark.parametrize(
    "variant",
    [
        *("qwen3_next_plain", "qwen3_5", "qwen3_5_moe"),
        *("granite_4_hybrid", "nemotron_h", "nemotron_h_moe", "nemotron_h_latent", "mamba2"),
    ],
)
def test_tokens_of_a_gguf_file_are_those_of_the_checkpoint(
    variant: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    where = tiny_checkpoint(variant)
    expected, found = (
        outputs(Server(make_runner(each)).run(requests(temperature=0.0)))
        for each in (where, write_gguf(where, tmp_path / "model.gguf"))
    )
    assert found == expected


def test_a_sequence_begins_without_what_its_row_had(folder: Path, alone: dict[Any, list[int]]) -> None:
    """And would not give the same tokens with another state."""
    runner = make_runner(folder, max_num_seqs=2)
    runner.pages.states.fill_(torch.nan)
    server = Server(runner, max_num_seqs=2)
    assert outputs(server.run(requests())) == alone
    server.scheduler.add(requests()[-1], 0.0)
    server.step()
    runner.pages.states.mul_(0.5)
    deltas = [delta for _ in range(23) for delta in server.step() or []]
    assert outputs(deltas)["7", 0] != alone["7", 0][1:]


def test_choices_and_equal_prompts_share_nothing(folder: Path, alone: dict[Any, list[int]]) -> None:
    server = Server(make_runner(folder), caching=True)
    for _ in range(2):
        deltas = server.run(requests(choices=2))
        assert not any(delta.cached_tokens for delta in deltas)
        assert {key: tokens for key, tokens in outputs(deltas).items() if key[1] == 0} == alone


def test_memory_is_as_planned(folder: Path) -> None:
    config = EngineConfig(model=str(folder), name="tiny", max_model_len=64, max_num_seqs=3, kv_cache_bytes=1 << 20)
    runner, spec = load_runner(config, progress=False), load_spec(folder)
    (row,) = (row for row in runner.capacity.memory if row.name == "states")
    matrices, tail = 4 * 16 * 24, 2 * (2 * 2 * 16 + 4 * 24)
    assert row.bytes == runner.pages.states.nbytes == 3 * 3 * (matrices + tail) * 4
    assert model_facts(spec).state_elements == 3 * (matrices + tail)
    assert runner.capacity.keeps == "states"
    runner.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["Layers keep states", "states", "no prefix cache", "refused token"]),
        (["--enable-prefix-caching"], ["--enable-prefix-caching", "states", "leave it out"]),
        (["--speculation", "suffix"], ["--speculation", "states", "auto or off"]),
        (["--device", "cuda", "--hardware", "h100"], ["--device", "states", "--device cpu"]),
        (["--tensor-parallel-size", "2"], ["keeps states", "--tensor-parallel-size"]),
        (["--pipeline-parallel-size", "2"], ["keeps states", "--pipeline-parallel-size"]),
    ],
)
def test_plan_says_what_there_is_not(folder: Path, flags: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", str(folder), *flags])
    text = " ".join((result.output + str(result.exception or "")).split())
    assert (result.exit_code == 0) == (not flags)
    assert all(word in text for word in words), text


def test_ranks_are_refused(folder: Path) -> None:
    with pytest.raises(CannotSplit, match="keeps states and is not divided"):
        shard(load_spec(folder), Split(1, 2).places[0])
