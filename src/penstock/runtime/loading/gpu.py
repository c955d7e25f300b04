"""From a configuration to a runner on a GPU: weights read straight into its memory, what a step takes measured, and all
that is left given to the KV cache."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.config import ConfigError, DoesNotFit, EngineConfig, ModelFacts, Place, size_memory, stored_as
from penstock.config.gpu import no_gpu, too_few_gpus
from penstock.config.memory import (
    CONTEXT_BYTES,
    gpu_budget,
    graphs_row,
    naming_rank,
    plan_tokens,
    pool_blocks,
    weights_note,
)
from penstock.config.sizes import format_bytes
from penstock.families import ModelSpec, load_spec, model_facts, shard
from penstock.kernels import (
    Needs,
    Platform,
    check_attention,
    check_kv_dtype,
    detect_platform,
    select_kernels,
    select_packing,
)
from penstock.messages import MemoryRow
from penstock.runtime.device import CudaDevice, Device
from penstock.runtime.loading.cache_root import cache_root
from penstock.runtime.loading.device_memory import CudaMemory, DeviceMemory
from penstock.runtime.loading.warmup import warm_up, warm_up_blocks, warm_up_decode
from penstock.runtime.mesh.device_links import ExchangeLimits
from penstock.runtime.mesh.mesh import Mesh
from penstock.runtime.pages import KVPages
from penstock.runtime.prompt_slices import PROMPT_LOGPROB_ROWS
from penstock.runtime.runner import ModelRunner
from penstock.runtime.step_kernels import StepKernels
from penstock.weights.load import load_parameters

ONE = Place()  # of a model that is whole

logger = logging.getLogger(__name__)


def load_gpu_runner(
    config: EngineConfig,
    place: Place = ONE,
    rendezvous: str = "",
    local: tuple[int, int] = (0, 1),
    *,
    progress: bool = True,
) -> ModelRunner:
    """On a GPU that this process may use: as which of how many ranks there, `local` says. `place` and `rendezvous` are
    as of `load_device_runner`.

    Raises ConfigError where torch finds none, or fewer than ranks, and as `load_device_runner` does.
    """
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
        raise ConfigError(no_gpu(error)) from None
    index, ranks = local
    if ranks > torch.cuda.device_count():
        raise ConfigError(too_few_gpus(ranks, torch.cuda.device_count()))
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    progress = progress and place.rank == 0
    return load_device_runner(
        config, CudaDevice(device), detect_platform("cuda"), CudaMemory(device), place, rendezvous, progress=progress
    )


def load_device_runner(
    config: EngineConfig,
    device: Device,
    platform: Platform,
    memory: DeviceMemory,
    place: Place = ONE,
    rendezvous: str = "",
    *,
    step_kernels: StepKernels | None = None,
    progress: bool = True,
) -> ModelRunner:
    """Size memory, read the weights into the device's, measure what steps take, allocate the KV pages, capture graphs.
    `step_kernels` are as of ModelRunner.

    As the rank at `place`, of several: read its part, and meet the others at `rendezvous` (see Mesh). Each measures its
    own memory, and all have as many KV blocks as the one with the least room.

    Raises DoesNotFit, before weights are read where that can be known; CannotSplit, CannotQuantize, UnsupportedModel,
    CheckpointError, OSError, or MeshError. The processor's threads are left alone.
    """
    with naming_rank(place.rank, place.split):
        return _load(config, device, platform, memory, place, rendezvous, step_kernels, progress)


def _load(
    config: EngineConfig,
    device: Device,
    platform: Platform,
    memory: DeviceMemory,
    place: Place,
    rendezvous: str,
    step_kernels: StepKernels | None,
    progress: bool,
) -> ModelRunner:
    folder, where = Path(config.model), device.where
    whole = load_spec(folder)
    spec = shard(whole, place)
    facts = model_facts(spec)
    dtype = getattr(torch, config.dtype)
    needs = Needs(dtype, config.block_size, spec.head_dims, config.deterministic, config.attention_backend)
    packing = select_packing(platform, needs, config.quantization, config.quantization_group, where)
    check_kv_dtype(platform, needs, config.kv_dtype)
    check_attention(needs)
    before = memory.usage()
    budget = gpu_budget(before.total, config)
    # What others have taken; the context, which there may be already, is among what is expected.
    taken = max(before.total - before.free - before.held - CONTEXT_BYTES, 0)
    expected = size_memory(facts, config, max(budget - taken, 0))
    with _remedied(memory, "while weights were read", _smaller_weights(config)):
        parameters = load_parameters(folder, spec, dtype, whole=whole, packing=packing, device=where, progress=progress)
        weights = memory.usage().tensors - before.tensors
    kernels = select_kernels(platform, needs)
    mesh = join_mesh(config, spec, place, rendezvous, where)

    def make(parameters: dict[str, Any], num_blocks: Sequence[int], **more: Any) -> ModelRunner:
        pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype), device=where)
        return ModelRunner(
            spec, parameters, kernels, config, pages, device, step_kernels=step_kernels, mesh=mesh, **more
        )

    at_first = _least(mesh, "tokens of KV cache expected", expected.kv_tokens)
    smaller = f"set --max-num-batched-tokens {max(config.max_num_batched_tokens // 2, config.max_num_seqs)} or less"
    with _remedied(memory, "while steps were measured", smaller), _timed("steps measured"):
        measured = _measure(config, facts, lambda blocks: make(dict(parameters), blocks), memory, at_first, weights)
    tokens = _least(mesh, "tokens of KV cache", size_memory(facts, config, budget, measured).kv_tokens)
    plan = plan_tokens(facts, config, budget, tokens, measured)
    root = cache_root(spec, parameters, config, platform, kernels)
    less = f"set --gpu-memory-utilization {max(config.gpu_memory_utilization - 0.05, 0.05):.2f} or less"
    with _remedied(memory, "while graphs were captured", less), _timed("KV cache allocated and graphs captured"):
        runner = make(parameters, plan.num_blocks, cache_root=root, memory=plan.rows)
        held = memory.usage().held
        runner.capture(progress)
        warm_up_decode(runner, config)
    logger.info(
        "weights in %s; kernels on %s %s: %s; %s tokens of KV cache; graphs took %s",
        stored_as(config),
        platform.device,
        platform.capability,
        kernels.fingerprint,
        f"{plan.kv_tokens:,}",
        format_bytes(memory.usage().held - held),
    )
    return runner


def join_mesh(
    config: EngineConfig, spec: ModelSpec, place: Place, rendezvous: str, device: torch.device
) -> Mesh | None:
    """The ranks of a model on devices; `spec` is this one's part. None where there is but one. MeshError where they do
    not come together."""
    if place.split.world == 1:
        return None
    limits = ExchangeLimits(
        device,
        max(config.max_num_batched_tokens, config.max_num_seqs),
        spec.hidden_size,
        getattr(torch, config.dtype),
        max(config.max_num_seqs, PROMPT_LOGPROB_ROWS),
        spec.vocabulary,
        config.deterministic,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Mesh(place, rendezvous, message_bytes=0, backend=backend, limits=limits, timeout=config.step_deadline)


def _least(mesh: Mesh | None, what: str, number: int) -> int:
    return number if mesh is None else mesh.minimum(what, number)


def _smaller_weights(config: EngineConfig) -> str:
    smaller = "use a GPU with more memory"
    return smaller if config.quantization == "int4" else f"set --quantization int4, or {smaller}"


@contextmanager
def _timed(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - began)


def _measure(
    config: EngineConfig,
    facts: ModelFacts,
    make: Callable[[Sequence[int]], ModelRunner],
    memory: DeviceMemory,
    tokens: int,
    weights: int,
) -> tuple[MemoryRow, ...]:
    """The memory table but for the KV cache, from the largest steps of a runner that has a small one, of no more than
    `tokens` tokens: `make` gives it, with so many blocks per KV group."""
    memory.settle()
    blocks = tuple(min(count, warm_up_blocks(config)) for count in pool_blocks(facts, config, tokens))
    runner = make(blocks)
    warm_up(runner, config)
    pages, usage = runner.pages.bytes, memory.usage()
    runner.release()
    del runner
    memory.settle()
    steps = f"measured: steps of {config.max_num_batched_tokens} tokens, {config.max_num_seqs} sequences sampled"
    rows = (
        MemoryRow("weights", weights, weights_note(facts, config)),
        MemoryRow("activations", max(usage.peak - weights - pages, 0), steps),
        MemoryRow(
            "runtime",
            max(usage.total - usage.free - usage.held, 0),
            "measured: CUDA's context, libraries and kernels, and other processes",
        ),
    )
    return rows if config.enforce_eager else (*rows, graphs_row(facts, config))


@contextmanager
def _remedied(memory: DeviceMemory, when: str, remedy: str) -> Iterator[None]:
    """What the device has no room for becomes DoesNotFit, with what to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        usage = memory.usage()
        raise DoesNotFit(
            f"the GPU's memory of {format_bytes(usage.total)} ran out {when}: torch holds {format_bytes(usage.held)}, "
            f"CUDA and other processes {format_bytes(max(usage.total - usage.free - usage.held, 0))}; {remedy}, or "
            "stop what else runs there"
        ) from None
