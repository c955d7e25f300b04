"""The fidelity suite through the device's runner, two plans outstanding: on a GPU every family, graphs captured; where
there is none, one family with this machine's processor in its place, and what needs a GPU is skipped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.messages import GenerateRequest, SamplingParams
from penstock.runtime.runner import ModelRunner
from tests.checkpoints import ON_GPUS, tiny_model
from tests.kernels.triton.device import DEVICE
from tests.kernels.triton.test_ops import GPU
from tests.models.logits import Checkpoint, assert_near_in_bf16, expected_logits, make_prompts
from tests.models.serving import Server, make_device_runner, outputs

ON_GPU = DEVICE.type == "cuda"
FAMILIES = ON_GPUS if ON_GPU else ("qwen3",)

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def runner_of(folder: Path, dtype: str, **settings: Any) -> ModelRunner:
    """With weights packed on the device while they are read, and graphs unless they are not wanted."""
    return make_device_runner(folder, device=DEVICE, dtype=dtype, packed=True, **settings)


def serve(runner: ModelRunner, requests: Sequence[GenerateRequest], budget: int = 2048) -> dict[str, list[int]]:
    """Output ids by request."""
    return {request: tokens for (request, _), tokens in outputs(Server(runner, budget=budget).run(requests)).items()}


def request_for(name: str, prompt: Sequence[int], count: int, *, temperature: float = 0.0) -> GenerateRequest:
    sampling = SamplingParams(seed=len(prompt), max_tokens=count, temperature=temperature, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling)


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_tokens_of_a_mixed_batch(variant: str, tiny_checkpoint: Checkpoint) -> None:
    """Where each is what transformers holds most likely after those before, all are equal."""
    model, prompts, count = tiny_model(variant), make_prompts(seed=1), 64 if ON_GPU else 20
    requests = [request_for(str(i), prompt, count) for i, prompt in enumerate(prompts)]
    # A budget of 45 splits prompts anywhere, and mixes their chunks with decodes.
    tokens = serve(runner_of(tiny_checkpoint(variant), "float32"), requests, budget=45)
    for i, prompt in enumerate(prompts):
        output = tokens[str(i)]
        best = expected_logits(model, [*prompt, *output])[len(prompt) - 1 : -1].argmax(-1)
        assert output == best.tolist() and len(output) == count


@needs_gpu
@pytest.mark.parametrize("variant", ["llama3", "qwen2", "qwen3", "mistral_window", "gemma3", "qwen2_moe"])
def test_logits_in_bf16(variant: str, tiny_checkpoint: Checkpoint) -> None:
    assert_near_in_bf16(variant, tiny_checkpoint, GPU, device=DEVICE)


@needs_gpu
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "qwen3_moe"])
def test_a_deterministic_request_is_the_same_alone_in_chunks_and_without_graphs(
    variant: str, quantization: str, tiny_checkpoint: Checkpoint
) -> None:
    folder = tiny_checkpoint(variant, dtype="bfloat16")
    requests = [request_for(str(i), prompt, 48, temperature=1.0) for i, prompt in enumerate(make_prompts(seed=2))]
    settings = {"quantization": quantization, "deterministic": True}
    together = serve(runner_of(folder, "bfloat16", **settings), requests)
    eager = {**settings, "enforce_eager": True}
    assert serve(runner_of(folder, "bfloat16", **eager), requests, budget=21) == together
    alone = Server(runner_of(folder, "bfloat16", **eager))
    for request in requests[::3]:
        assert outputs(alone.run([request]))[request.request_id, 0] == together[request.request_id]
