"""Logits and greedy tokens of every family are those of transformers."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.families import ModelSpec, load_spec, spec_from_config
from penstock.families.llama_like import with_attention
from penstock.kernels import detect_platform
from penstock.messages import GenerateRequest, SamplingParams
from penstock.weights.load import load_parameters
from tests.checkpoints import TYPICAL, VARIANTS, tiny_model, write_tiny_checkpoint
from tests.models.logits import (
    FP32_BOUND,
    VOCAB,
    Checkpoint,
    assert_near_in_bf16,
    assert_near_in_fp32,
    distance,
    exact_logits,
    expected_logits,
    kernels_on,
    logits_of,
    make_prompts,
)
from tests.models.serving import Server, make_runner, outputs
from tests.often import often

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_fp32(variant: str, tiny_checkpoint: Checkpoint) -> None:
    """They are transformers' own, and as near as these to what double precision gives. Transformers' are wrong
    themselves where scores of attention are large, on one processor or another: MKL adds in another order on each."""
    model, prompts, folder = tiny_model(variant), make_prompts(), tiny_checkpoint(variant)
    spec = load_spec(folder)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    kernels = kernels_on(detect_platform(), spec)
    theirs, exact = [expected_logits(model, prompt) for prompt in prompts], exact_logits(model, prompts)
    for chunk in (64, 7):
        ours = logits_of(spec, parameters, kernels, prompts, chunk=chunk)
        for got, *wanted in zip(ours, theirs, exact, strict=True):
            assert_near_in_fp32(got, *wanted)
        assert distance(ours, exact) <= FP32_BOUND * distance(theirs, exact)


@pytest.mark.parametrize("seed", often([1, 2, 3], [1]))
@pytest.mark.parametrize("variant", ["llama4_chunks", "ministral3_far"])
def test_positions_many_chunks_away(variant: str, seed: int, tmp_path: Path) -> None:
    """Prompts of up to eleven chunks, and of up to nineteen steps of the queries' temperature. Full attention over more
    tokens differs by fp32's own error."""
    folder, model = write_tiny_checkpoint(variant, tmp_path, seed=seed), tiny_model(variant, seed=seed)
    source = random.Random(seed)
    prompts = [
        [source.randrange(VOCAB) for _ in range(length)]
        for length in (21, 22, 64, 127, *([250] if variant == "llama4_chunks" else []))
    ]
    spec = load_spec(folder)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    for chunk in (64, 23):
        found = logits_of(spec, parameters, kernels_on(detect_platform(), spec), prompts, chunk=chunk)
        for prompt, got in zip(prompts, found, strict=True):
            assert_near_in_fp32(got, expected_logits(model, prompt))


# What a family's configuration says is not said in vain: variant, changed fields.
MATTERS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"attn_logit_softcapping": 3.0}),
    ("gemma2", {"final_logit_softcapping": 4.0}),
    ("gemma2", {"sliding_window": 15}),
    ("gemma2", {"query_pre_attn_scalar": 22}),
    ("gemma4", {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5}}}),
    ("gemma4", {"final_logit_softcapping": 4.0}),
    ("gemma4", {"sliding_window": 15}),
    ("gemma4_moe", {"top_k_experts": 2}),
    ("gemma4_moe", {"rms_norm_eps": 1e-1}),
    ("gemma4_shared", {"sliding_window": 15}),
    ("gemma4_shared", {"rms_norm_eps": 1e-1}),
    ("gemma4", {"rms_norm_eps": 1e-1}),
    ("granite", {"embedding_multiplier": 3.3}),
    ("granite", {"attention_multiplier": 0.25}),
    ("granite", {"residual_multiplier": 0.45}),
    ("granite", {"logits_scaling": 1.9}),
    ("cohere", {"logit_scale": 0.55}),
    ("cohere", {"layer_norm_eps": 1e-2}),
    ("cohere_plus", {"layer_norm_eps": 1e-1}),
    ("cohere2", {"sliding_window": 15}),
    ("olmo2", {"rms_norm_eps": 1e-1}),
    ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    ("arcee", {"rms_norm_eps": 1e-2}),
    ("ernie4_5", {"rope_parameters": {"rope_theta": 2e4}}),
    ("exaone4", {"sliding_window": 15}),
    ("exaone4", {"sliding_window_pattern": 2, "layer_types": None}),
    ("phi", {"layer_norm_eps": 1e-2}),
    ("stablelm", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("stablelm_normed", {"layer_norm_eps": 1e-1}),
    ("olmoe", {"norm_topk_prob": True}),
    ("minimax_m2", {"rms_norm_eps": 1e-2}),
    ("seed_oss", {"rms_norm_eps": 2e-2}),
    ("seed_oss", {"rope_parameters": {"rope_theta": 2e4}}),
    ("seed_oss_bias", {"rope_parameters": {"rope_type": "linear", "factor": 4.4}}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"hidden_act": "gelu_new"}),
    ("opt", {"activation_function": "gelu"}),
    ("glm4_moe", {"routed_scaling_factor": 1.7}),
    ("glm4_moe", {"norm_topk_prob": False}),
    ("glm4_moe_grouped", {"topk_group": 3}),
    ("phi3", {"sliding_window": 15}),
    ("gpt_oss", {"sliding_window": 15}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("gpt_oss", {"num_experts_per_tok": 3}),
    ("llama4", {"no_rope_layers": [1, 1, 1, 0]}),
    ("llama4_normed", {"use_qk_norm": False}),
    ("llama4_chunks", {"attention_chunk_size": 22}),
    ("llama4_chunks", {"attention_chunk_size": None}),
    ("llama4_chunks", {"floor_scale": 14}),
    ("llama4_chunks", {"attn_scale": 0.33}),
    ("llama4_chunks", {"attn_temperature_tuning": False}),
    ("llama4_chunks", {"layer_types": ["chunked_attention"] * 4}),
    ("granite_4", {"position_embedding_type": "rope"}),
    ("granite_4_hybrid", {"rms_norm_eps": 1e-2}),
    ("mamba2", {"layer_norm_epsilon": 5e-2}),
    ("nemotron_h", {"layer_norm_epsilon": 5e-2}),
    ("nemotron_h", {"mlp_hidden_act": "relu"}),
    ("nemotron_h_moe", {"mlp_hidden_act": "relu"}),
    ("nemotron_h_moe", {"routed_scaling_factor": 1.7}),
    ("nemotron_h_moe", {"norm_topk_prob": False}),
    ("nemotron_h_moe", {"topk_group": 3}),
    ("nemotron_h_moe", {"num_experts_per_tok": 2}),
    ("nemotron_h_latent", {"routed_scaling_factor": 1.7}),
    ("deepseek_v2_grouped", {"topk_method": "greedy"}),
    ("deepseek_v2_grouped", {"topk_group": 3}),
    ("deepseek_v3", {"routed_scaling_factor": 2.0}),
    ("deepseek_v3", {"qk_rope_head_dim": 16, "rope_parameters": {"rope_theta": 1e4}}),  # without yarn
    ("qwen3_next", {"rms_norm_eps": 5e-2}),
    ("qwen3_next", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("qwen3_next", {"norm_topk_prob": False}),
    ("qwen3_5", {"rope_parameters": {"rope_theta": 5e4}}),
    ("llama2", {"rope_parameters": {"rope_theta": 2e4}}),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_theta": 2e4}, "full_attention": {"rope_theta": 1e6}}}),
    ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e5}}}),
    ("phi3", {"rope_parameters": {"rope_theta": 2e4}}),
]
ONE_EACH = list({variant: (variant, change) for variant, change in reversed(MATTERS)}.values())
ROPES = ("llama_yarn", "deepseek_v2", "deepseek_v3", "olmo3", "phi3_long", "ministral3", "gpt_oss")


@pytest.mark.parametrize(("variant", "change"), often(MATTERS, ONE_EACH), ids=str)
def test_a_wrong_value_shifts_log_probabilities(
    variant: str, change: dict[str, Any], tiny_checkpoint: Checkpoint
) -> None:
    folder, prompts = tiny_checkpoint(variant), make_prompts()[-3:]
    config, spec = json.loads((folder / "config.json").read_text()), load_spec(folder)
    assert_shifts(folder, spec, spec_from_config(config | change), prompts)


@pytest.mark.parametrize("change", [{"every": 17}, {"scale": 0.11}, {"first": 1}], ids=str)
def test_a_wrong_temperature_shifts_log_probabilities(change: dict[str, Any], tiny_checkpoint: Checkpoint) -> None:
    folder, prompts = tiny_checkpoint("ministral3_far"), make_prompts()[-3:]
    spec = load_spec(folder)
    layers = []
    for layer in spec.layers:
        rope = layer.attention.rope
        wrong = replace(rope, temperature=msgspec.structs.replace(rope.temperature, **change))
        layers.append(with_attention(layer, rope=wrong))
    assert_shifts(folder, spec, replace(spec, layers=tuple(layers)), prompts)


@pytest.mark.parametrize("variant", ROPES)
def test_a_wrong_rope_shifts_log_probabilities(variant: str, tiny_checkpoint: Checkpoint) -> None:
    """By a factor of 1.1 in what positions are divided by."""
    folder, prompts = tiny_checkpoint(variant), make_prompts()[-3:]
    spec = load_spec(folder)
    layers = []
    for layer in spec.layers:
        rope = layer.attention.rope
        short = tuple(factor * 1.1 for factor in rope.short_factors)
        turned = replace(rope, factor=rope.factor * 1.1, short_factors=short)
        layers.append(replace(layer, attention=replace(layer.attention, rope=turned)))
    assert_shifts(folder, spec, replace(spec, layers=tuple(layers)), prompts)


def assert_shifts(folder: Path, spec: ModelSpec, wrong: ModelSpec, prompts: list[list[int]]) -> None:
    """Another spec over the same weights gives other log-probabilities, by far more than is allowed."""
    kernels = kernels_on(detect_platform(), spec)
    right, shifted = (
        logits_of(each, load_parameters(folder, spec, torch.float32, progress=False), kernels, prompts)
        for each in (spec, wrong)
    )
    assert max((a - b).abs().max().item() for a, b in zip(right, shifted, strict=True)) > 1e-3


@pytest.mark.parametrize(
    "variant", ["llama3", "qwen2", "qwen3", "mistral_window", "gemma3", *MIXTURES, "gpt_oss", "qwen3_5"]
)
def test_logits_in_bf16(variant: str, tiny_checkpoint: Checkpoint) -> None:
    assert_near_in_bf16(variant, tiny_checkpoint, detect_platform())


@pytest.mark.parametrize("variant", often(VARIANTS, TYPICAL))
def test_greedy_tokens_of_a_mixed_batch(variant: str, tiny_checkpoint: Checkpoint) -> None:
    """64 tokens for 8 prompts. Where each is what transformers holds most likely after those before, all are equal."""
    model, prompts = tiny_model(variant), make_prompts(seed=1)
    sampling = SamplingParams(seed=0, max_tokens=64, temperature=0.0, ignore_eos=True)
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=tuple(prompt), sampling=sampling)
        for i, prompt in enumerate(prompts)
    ]
    # A budget of 45 splits prompts anywhere, and mixes their chunks with decodes.
    tokens = outputs(Server(make_runner(tiny_checkpoint(variant)), budget=45).run(requests))
    for i, prompt in enumerate(prompts):
        output = tokens[str(i), 0]
        best = expected_logits(model, [*prompt, *output])[len(prompt) - 1 : -1].argmax(-1)
        assert output == best.tolist() and len(output) == 64
