"""Latent attention: what is kept of a token, and what is refused."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config import EngineConfig
from penstock.families import load_spec, model_facts
from penstock.families.hf_config import UnsupportedModel
from penstock.families.registry import spec_from_config
from penstock.kernels import Needs, Platform, detect_platform, select_packing
from penstock.kernels.native.packing import PackedWeight
from penstock.messages import GenerateRequest, SamplingParams
from penstock.runtime.loading.load import load_runner
from penstock.weights.load import load_parameters
from tests.checkpoints import tiny_model
from tests.families.divisible import CONFIGS
from tests.gguf_models import write_gguf
from tests.models.logits import (
    FP32_BOUND,
    Checkpoint,
    assert_near_in_fp32,
    distance,
    exact_logits,
    expected_logits,
    kernels_on,
    logits_of,
    make_prompts,
)
from tests.models.serving import Server, make_runner, outputs
from tests.weights.gguf_values import values_of
from tests.weights.test_fp8 import write_pair

LATENT = 32 + 16  # a latent and a rotated key


@pytest.fixture(scope="module")
def folder(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("deepseek_v2")


def test_a_token_keeps_a_latent_and_one_key(folder: Path) -> None:
    (group,) = model_facts(load_spec(folder)).groups
    assert group.page.block_bytes(16, 2) == 16 * LATENT * 2
    config = EngineConfig(model=str(folder), name="tiny", max_model_len=64, max_num_seqs=3, kv_cache_bytes=1 << 20)
    runner = load_runner(config, progress=False)
    (row,) = (row for row in runner.capacity.memory if row.name == "KV cache")
    assert row.bytes == runner.capacity.groups[0].num_blocks * 3 * 16 * LATENT * 2
    runner.close()


@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3"])
def test_torch_computes_what_transformers_does_too(variant: str, tiny_checkpoint: Checkpoint) -> None:
    """As where there are no native kernels. The two round at different places, so both are held to double precision."""
    where, prompts, model = tiny_checkpoint(variant), make_prompts()[3:6], tiny_model(variant)
    spec, exact = load_spec(where), exact_logits(model, prompts)
    parameters = load_parameters(where, spec, torch.float32, progress=False)
    computed = logits_of(spec, parameters, kernels_on(Platform("cpu", "AVX2"), spec), prompts, chunk=7)
    for got, want in zip(computed, exact, strict=True):
        assert_near_in_fp32(got, want)
    theirs = [expected_logits(model, prompt) for prompt in prompts]
    assert distance(computed, exact) <= FP32_BOUND * distance(theirs, exact)


def test_a_checkpoint_in_fp8_is_the_model_of_its_values(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Blocks of scales end within heads, and within what makes a head's key."""
    fp8, values = write_pair(tiny_checkpoint("deepseek_v3"), tmp_path, "blocks")
    model = AutoModelForCausalLM.from_pretrained(values, dtype=torch.float32).eval()
    spec, prompts = load_spec(fp8), make_prompts()
    parameters = load_parameters(fp8, spec, torch.float32, progress=False)
    computed = logits_of(spec, parameters, kernels_on(detect_platform(), spec), prompts, chunk=7)
    for prompt, got in zip(prompts, computed, strict=True):
        assert_near_in_fp32(got, expected_logits(model, prompt))
    sampling = SamplingParams(seed=0, max_tokens=12, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=tuple(prompt), sampling=sampling)
        for i, prompt in enumerate(prompts[:4])
    ]
    for (name, _), tokens in outputs(Server(make_runner(fp8)).run(requests)).items():
        prompt = prompts[int(name)]
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
        assert tokens == theirs[0, len(prompt) :].tolist() and len(set(tokens)) > 6


@pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
@pytest.mark.parametrize("variant", ["deepseek_v2", "deepseek_v3"])
def test_a_gguf_file_is_the_model_that_it_was_made_of(
    variant: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """What makes keys and values is two tensors there, and codes are packed as they are."""
    source, prompts = tiny_checkpoint(variant), make_prompts()
    file, codes = (write_gguf(source, tmp_path / f"{kind}.gguf", kind=kind) for kind in ("F32", "Q8_0"))
    whole = logits_in_fp32(source, prompts)
    assert all(map(torch.equal, logits_in_fp32(file, prompts), whole))
    spec = load_spec(codes)
    values = load_parameters(codes, spec, torch.float32, progress=False)
    packing = select_packing(detect_platform(), Needs(torch.bfloat16))
    packed = load_parameters(codes, spec, torch.bfloat16, packing=packing, progress=False)
    grouped = [
        name for name, each in packed.items() if isinstance(each, PackedWeight) and each.format.scheme == "grouped"
    ]
    assert "layers.0.value_up.weight" in grouped
    for name in grouped:
        if not packed[name].gated:
            assert torch.equal(torch.from_numpy(values_of(packed[name])), values[name]), name


def logits_in_fp32(where: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    spec = load_spec(where)
    parameters = load_parameters(where, spec, torch.float32, progress=False)
    return logits_of(spec, parameters, kernels_on(detect_platform(), spec), prompts, chunk=7)


def test_a_prefix_hit_and_preemption_change_nothing(folder: Path) -> None:
    sampling = SamplingParams(seed=0, max_tokens=24, temperature=1.0, ignore_eos=True)
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=tuple(prompt), sampling=sampling)
        for i, prompt in enumerate(make_prompts(seed=3))
    ]
    alone = {key: ids for each in requests for key, ids in outputs(Server(make_runner(folder)).run([each])).items()}
    server = Server(make_runner(folder), caching=True, blocks=20, budget=45)
    for wave in range(2):
        deltas = server.run(requests)
        assert outputs(deltas) == alone
        assert any(delta.cached_tokens for delta in deltas) or not wave
    assert server.scheduler.stats().preemptions


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["KV cache"]),
        (["--tensor-parallel-size", "2"], ["KV cache"]),
        (["--kv-cache-dtype", "int8"], ["--kv-cache-dtype", "latents", "leave it at auto"]),
        (["--device", "cuda", "--hardware", "h100"], ["--device", "latent attention", "--device cpu"]),
    ],
)
def test_plan_says_what_there_is_not(folder: Path, flags: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["plan", str(folder), *flags])
    text = " ".join((result.output + str(result.exception or "")).split())
    assert (result.exit_code == 0) == (len(words) == 1), text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kv_lora_rank", 24, "a multiple of 16"),
        ("v_head_dim", 24, "a multiple of 16"),
        ("n_group", 3, "equal groups"),
        ("topk_method", "noaux_tc", "greedy"),
        ("norm_topk_prob", True, "false"),
        ("scoring_func", "sigmoid", "softmax"),
        ("moe_layer_freq", 2, "1"),
    ],
)
def test_what_is_not_computed_is_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{field}.*{words}"):
        spec_from_config(
            {
                "vocab_size": 99,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                **CONFIGS["deepseek_v3"],
                "max_position_embeddings": 128,
                "architectures": ["DeepseekV2ForCausalLM"],
                "num_experts_per_tok": 2,
                field: value,
            }
        )
