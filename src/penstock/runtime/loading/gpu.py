"""Loads a runner on a GPU: reads the weights into its memory, measures what a step needs, and allocates the rest of the
budget as KV cache."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.config import ConfigError, DoesNotFit, EngineConfig, ModelFacts, RankPlace, size_memory, stored_as
from penstock.config.machine.gpu import no_gpu, too_few_gpus
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
from penstock.kernels import Needs, Platform, check_kv_dtype, detect_platform, select_kernels, select_packing
from penstock.kernels.native.loader import instruction_sets
from penstock.messages import MemoryRow
from penstock.runtime.device import CudaDevice, Device
from penstock.runtime.loading.device_memory import CudaMemory, DeviceMemory
from penstock.runtime.loading.identity import identify
from penstock.runtime.loading.warmup import blocks_for_warm_up, warm_up_all_sizes, warm_up_one_sequence
from penstock.runtime.mesh.device_links import ExchangeLimits
from penstock.runtime.mesh.mesh import Mesh
from penstock.runtime.pages import KVPages
from penstock.runtime.prompt_slices import PROMPT_LOGPROB_ROWS
from penstock.runtime.runner import ModelRunner
from penstock.runtime.step_kernels import StepKernels
from penstock.weights.digest import WeightsDigest
from penstock.weights.load import load_parameters

WHOLE_MODEL = RankPlace()

logger = logging.getLogger(__name__)


def load_gpu_runner(
    config: EngineConfig,
    place: RankPlace = WHOLE_MODEL,
    rendezvous: str = "",
    local: tuple[int, int] = (0, 1),
    *,
    progress: bool = True,
) -> ModelRunner:
    """Loads a runner on one GPU of this machine. `local` is (index, number) of ranks on this machine:
    rank i uses GPU i. `place` and `rendezvous` are as for `load_device_runner`.

    Raises ConfigError when torch finds no GPU, or fewer than ranks, and the errors of `load_device_runner`.
    """
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
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
    place: RankPlace = WHOLE_MODEL,
    rendezvous: str = "",
    *,
    step_kernels: StepKernels | None = None,
    progress: bool = True,
) -> ModelRunner:
    """Sizes memory, reads the weights, measures what steps need, allocates the KV pages and captures graphs.
    `step_kernels` are as for ModelRunner.

    One rank of several reads its part of the weights, by `place`, and connects to the other ranks at `rendezvous` (see
    Mesh). Each rank measures its own memory; all allocate as many KV blocks as fit on every rank.

    Raises DoesNotFit (before weights are read when the sizes already show it), CannotSplit, CannotQuantize,
    UnsupportedModel, CheckpointError, OSError, or MeshError. Does not change the number of CPU threads.
    """
    with naming_rank(place.rank, place.split):
        return _load(config, device, platform, memory, place, rendezvous, step_kernels, progress)


def _load(
    config: EngineConfig,
    device: Device,
    platform: Platform,
    memory: DeviceMemory,
    place: RankPlace,
    rendezvous: str,
    step_kernels: StepKernels | None,
    progress: bool,
) -> ModelRunner:
    whole = load_spec(Path(config.model))
    spec = shard(whole, place)
    # Without native code nothing decodes the blocks of a GGUF file: the weights become dense.
    facts = model_facts(spec).for_kernels(next(iter(instruction_sets()), ""))
    dtype, where = getattr(torch, config.dtype), device.where
    needs = Needs(dtype, config.block_size, spec.head_dims, config.deterministic)
    packing = select_packing(platform, needs, config.quantization, config.quantization_group, where)
    check_kv_dtype(platform, needs, config.kv_dtype)
    before = memory.usage()
    budget = gpu_budget(before.total, config)
    # Memory of other processes. This process's CUDA context may exist already; `size_memory` counts it as well.
    taken = max(before.total - before.free - before.reserved - CONTEXT_BYTES, 0)
    expected = size_memory(facts, config, max(budget - taken, 0))
    digest = WeightsDigest(Path(config.model)) if place.rank == 0 else None
    with _advise_when_full(memory, "while weights were read", _smaller_weights(config)):
        parameters = load_parameters(
            Path(config.model), spec, dtype, whole=whole, packing=packing, device=where, progress=progress
        )
        weights = memory.usage().allocated - before.allocated
    kernels = select_kernels(platform, needs)
    mesh = join_mesh(config, spec, place, rendezvous, where)

    def make(parameters: dict[str, Any], num_blocks: Sequence[int], **more: Any) -> ModelRunner:
        pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype), device=where)
        return ModelRunner(
            spec, parameters, kernels, config, pages, device, step_kernels=step_kernels, mesh=mesh, **more
        )

    trial_tokens = _minimum(mesh, "tokens of KV cache expected", expected.kv_tokens)
    with _advise_when_full(memory, "while steps were measured", _smaller_steps(config)), _log_seconds("steps measured"):
        measured = _measure(config, facts, lambda blocks: make(dict(parameters), blocks), memory, trial_tokens, weights)
    kv_tokens = _minimum(mesh, "tokens of KV cache", size_memory(facts, config, budget, measured).kv_tokens)
    plan = plan_tokens(facts, config, budget, kv_tokens, measured)
    identity = identify(whole, digest, config, platform, kernels)
    with (
        _advise_when_full(memory, "while graphs were captured", _smaller_budget(config)),
        _log_seconds("KV cache allocated and graphs captured"),
    ):
        runner = make(parameters, plan.num_blocks, identity=identity, memory=plan.rows)
        reserved = memory.usage().reserved
        runner.capture(progress)
        warm_up_one_sequence(runner, config)
    graph_bytes = memory.usage().reserved - reserved
    _log_loaded(config, facts, platform, kernels.fingerprint, plan.kv_tokens, graph_bytes)
    return runner


def join_mesh(
    config: EngineConfig, spec: ModelSpec, place: RankPlace, rendezvous: str, device: torch.device
) -> Mesh | None:
    """Connects the ranks of a model on devices; `spec` is this rank's part. Returns None when there is one rank. Raises
    MeshError."""
    if place.split.world == 1:
        return None
    limits = ExchangeLimits(
        device,
        max(config.max_num_batched_tokens, config.max_num_seqs),
        spec.hidden_size,
        getattr(torch, config.dtype),
        max(config.max_num_seqs + config.max_step_drafts, PROMPT_LOGPROB_ROWS),
        spec.vocabulary,
        config.deterministic,
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Mesh(place, rendezvous, message_bytes=0, backend=backend, limits=limits, timeout=config.step_deadline)


def _minimum(mesh: Mesh | None, what: str, number: int) -> int:
    return number if mesh is None else mesh.minimum(what, number)


def _smaller_weights(config: EngineConfig) -> str:
    advice = "use a GPU with more memory"
    return advice if config.quantization == "int4" else f"set --quantization int4, or {advice}"


def _smaller_steps(config: EngineConfig) -> str:
    return f"set --max-num-batched-tokens {max(config.max_num_batched_tokens // 2, config.max_num_seqs)} or less"


def _smaller_budget(config: EngineConfig) -> str:
    return f"set --gpu-memory-utilization {max(config.gpu_memory_utilization - 0.05, 0.05):.2f} or less"


@contextmanager
def _log_seconds(what: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    logger.info("%s in %.1f s", what, time.perf_counter() - began)


def _log_loaded(
    config: EngineConfig, facts: ModelFacts, platform: Platform, fingerprint: str, kv_tokens: int, graph_bytes: int
) -> None:
    logger.info(
        "weights in %s; kernels on %s %s: %s; %s tokens of KV cache; graphs took %s",
        stored_as(config, stored=[matrix.stored for matrix in facts.matrices if not matrix.router]),
        platform.device,
        platform.capability,
        fingerprint,
        f"{kv_tokens:,}",
        format_bytes(graph_bytes),
    )


def _measure(
    config: EngineConfig,
    facts: ModelFacts,
    make: Callable[[Sequence[int]], ModelRunner],
    memory: DeviceMemory,
    tokens: int,
    weights: int,
) -> tuple[MemoryRow, ...]:
    """Returns the rows of the memory table except the KV cache, measured on the largest steps of a trial runner with a
    small KV cache. `make` takes the blocks per KV group and returns the runner; the cache holds at most `tokens`."""
    memory.release_unused()
    blocks = tuple(min(count, blocks_for_warm_up(config)) for count in pool_blocks(facts, config, tokens))
    runner = make(blocks)
    warm_up_all_sizes(runner, config)
    pages, usage = runner.pages.bytes, memory.usage()
    runner.release()
    del runner
    memory.release_unused()
    steps = f"measured: steps of {config.max_num_batched_tokens} tokens, {config.max_num_seqs} sequences sampled"
    rows = (
        MemoryRow("weights", weights, weights_note(facts, config)),
        MemoryRow("activations", max(usage.peak - weights - pages, 0), steps),
        MemoryRow(
            "runtime",
            max(usage.total - usage.free - usage.reserved, 0),
            "measured: CUDA's context, libraries and kernels, and other processes",
        ),
    )
    return rows if config.enforce_eager else (*rows, graphs_row(facts, config))


@contextmanager
def _advise_when_full(memory: DeviceMemory, when: str, advice: str) -> Iterator[None]:
    """Turns torch's out-of-memory error into DoesNotFit, with `advice` on what to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        usage = memory.usage()
        others = max(usage.total - usage.free - usage.reserved, 0)
        raise DoesNotFit(
            f"the GPU's memory of {format_bytes(usage.total)} ran out {when}: torch holds "
            f"{format_bytes(usage.reserved)}, CUDA and other processes {format_bytes(others)}; {advice}, or stop other "
            "processes on this GPU"
        ) from None
