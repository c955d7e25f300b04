"""The fidelity suite through the device's runner, two plans outstanding: on a GPU every family, graphs captured; where
there is none, one family with this machine's processor in its place, and what needs a GPU is skipped."""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.config import EngineConfig
from penstock.families import load_spec
from penstock.kernels import Needs, detect_platform, select_kernels, select_packing
from penstock.messages import GenerateRequest, SamplingParams, StepPlan, TokenDelta
from penstock.runtime.device_runner import DeviceRunner
from penstock.schedule import Scheduler, SchedulerConfig
from penstock.weights.load import load_parameters
from tests.checkpoints import VARIANTS, tiny_model
from tests.kernels.triton.device import DEVICE
from tests.models.serving import NUM_BLOCKS, Scattered, outputs
from tests.models.test_fidelity import BF16_BOUND, expected_logits, make_prompts

Checkpoint = Callable[..., Path]
ON_GPU = DEVICE.type == "cuda"
FAMILIES = tuple(VARIANTS) if ON_GPU else ("qwen3",)
SEQUENCES = 16

needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")


def make_runner(
    folder: Path, dtype: str, *, quantization: str = "none", deterministic: bool = False, eager: bool = False
) -> DeviceRunner:
    spec = load_spec(folder)
    config = EngineConfig(
        model=str(folder),
        name="tiny",
        dtype=dtype,  # type: ignore[arg-type]
        device=DEVICE.type,  # type: ignore[arg-type]
        quantization=quantization,  # type: ignore[arg-type]
        deterministic=deterministic,
        enforce_eager=eager,
        max_model_len=256,
        max_num_seqs=SEQUENCES,
        depth=2,
    )
    platform, kind = detect_platform(DEVICE.type), getattr(torch, dtype)
    head_dims = tuple(layer.head_dim for layer in spec.layers)
    needs = Needs(kind, config.block_size, head_dims, deterministic=deterministic)
    packing = select_packing(platform, needs, quantization, device=DEVICE)
    where = DEVICE if ON_GPU else None
    parameters = load_parameters(folder, spec, kind, packing=packing, device=where, progress=False)
    blocks = [NUM_BLOCKS] * len(spec.windows)
    runner = DeviceRunner(spec, parameters, select_kernels(platform, needs), config, blocks, device=DEVICE)
    runner.capture(progress=False)
    return runner


def serve(runner: DeviceRunner, requests: Sequence[GenerateRequest], budget: int = 2048) -> dict[str, list[int]]:
    """Output ids by request. Consecutive blocks of a sequence lie anywhere."""
    limits = SchedulerConfig(
        max_num_seqs=SEQUENCES, max_num_batched_tokens=budget, max_model_len=256, enable_prefix_caching=False
    )
    scheduler, scattered = Scheduler(limits, runner.capacity), Scattered(len(runner.capacity.groups), seed=7)
    for request in requests:
        scheduler.add(request, 0.0)
    deltas: list[TokenDelta] = []
    outstanding: deque[StepPlan] = deque()
    while True:
        while len(outstanding) < runner.capacity.depth and (plan := scheduler.plan(0.0)) is not None:
            runner.submit(scattered.plan(plan))
            outstanding.append(plan)
        if not outstanding:
            return {request: tokens for (request, _), tokens in outputs(deltas).items()}
        outstanding.popleft()
        deltas += scheduler.apply(runner.result(), 0.0)


def request_for(name: str, prompt: Sequence[int], count: int, *, temperature: float = 0.0) -> GenerateRequest:
    sampling = SamplingParams(seed=len(prompt), max_tokens=count, temperature=temperature, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt_ids=tuple(prompt), sampling=sampling)


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_tokens_of_a_mixed_batch(variant: str, tiny_checkpoint: Checkpoint) -> None:
    """Where each is what transformers holds most likely after those before, all are equal."""
    model, prompts, count = tiny_model(variant), make_prompts(seed=1), 64 if ON_GPU else 20
    requests = [request_for(str(i), prompt, count) for i, prompt in enumerate(prompts)]
    # A budget of 45 splits prompts anywhere, and mixes their chunks with decodes.
    tokens = serve(make_runner(tiny_checkpoint(variant), "float32"), requests, budget=45)
    for i, prompt in enumerate(prompts):
        output = tokens[str(i)]
        best = expected_logits(model, [*prompt, *output])[len(prompt) - 1 : -1].argmax(-1)
        assert output == best.tolist() and len(output) == count


@needs_gpu
@pytest.mark.parametrize("variant", ["llama3", "qwen2", "qwen3", "mistral_window", "gemma3", "qwen2_moe"])
def test_logits_in_bf16(variant: str, tiny_checkpoint: Checkpoint) -> None:
    """As near to the fp32 model as transformers in bf16, or nearly."""
    from tests.kernels.triton.test_models import GPU, kernels_on, logits_of  # interpreted, unless there is a GPU

    folder = tiny_checkpoint(variant, dtype="bfloat16")
    spec, prompts = load_spec(folder), make_prompts()
    exact, rounded = tiny_model(variant), tiny_model(variant).to(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())  # the same weights, so that the distance is that of the arithmetic
    parameters = load_parameters(folder, spec, torch.bfloat16, progress=False)
    kernels = kernels_on(GPU, spec, torch.bfloat16)
    ours: list[Tensor] = []
    theirs: list[Tensor] = []
    for prompt, got in zip(prompts, logits_of(spec, parameters, kernels, prompts, dtype=torch.bfloat16), strict=True):
        want = expected_logits(exact, prompt)
        ours.append((got - want).flatten())
        theirs.append((expected_logits(rounded, prompt) - want).flatten())
    distance, allowed = (torch.cat(parts).pow(2).mean().sqrt().item() for parts in (ours, theirs))
    assert 0 < distance <= BF16_BOUND * allowed


@needs_gpu
@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "qwen3_moe"])
def test_a_deterministic_request_is_the_same_alone_in_chunks_and_without_graphs(
    variant: str, quantization: str, tiny_checkpoint: Checkpoint
) -> None:
    folder = tiny_checkpoint(variant, dtype="bfloat16")
    requests = [request_for(str(i), prompt, 48, temperature=1.0) for i, prompt in enumerate(make_prompts(seed=2))]
    together = serve(make_runner(folder, "bfloat16", quantization=quantization, deterministic=True), requests)
    eager = make_runner(folder, "bfloat16", quantization=quantization, deterministic=True, eager=True)
    assert serve(eager, requests, budget=21) == together
    for request in requests[::3]:
        assert serve(eager, [request])[request.request_id] == together[request.request_id]
