"""Logits and greedy tokens of every family are those of transformers."""

import pytest
import torch

from penstock.families import load_spec
from penstock.kernels import detect_platform
from penstock.messages import GenerateRequest, SamplingParams
from penstock.weights.load import load_parameters
from tests.checkpoints import VARIANTS, tiny_model
from tests.models.logits import (
    Checkpoint,
    assert_near_in_bf16,
    expected_logits,
    kernels_on,
    logits_of,
    make_prompts,
)
from tests.models.serving import Server, make_runner, outputs

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_in_fp32(variant: str, tiny_checkpoint: Checkpoint) -> None:
    model, prompts, folder = tiny_model(variant), make_prompts(), tiny_checkpoint(variant)
    spec = load_spec(folder)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    kernels = kernels_on(detect_platform(), spec)
    for chunk in (64, 7):
        for prompt, got in zip(prompts, logits_of(spec, parameters, kernels, prompts, chunk=chunk), strict=True):
            torch.testing.assert_close(got, expected_logits(model, prompt), rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("variant", ["llama3", "qwen2", "qwen3", "mistral_window", "gemma3", *MIXTURES])
def test_logits_in_bf16(variant: str, tiny_checkpoint: Checkpoint) -> None:
    assert_near_in_bf16(variant, tiny_checkpoint, detect_platform())


@pytest.mark.parametrize("variant", VARIANTS)
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
