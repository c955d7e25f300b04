"""Loads a runner on the CPU: sizes memory, reads and packs the weights, allocates the KV cache."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig, RankPlace, detect_hardware, format_bytes, memory_table, size_memory, stored_as
from penstock.config.weights import Stored, codes_of
from penstock.families import ModelSpec, load_spec, model_facts, shard
from penstock.kernels import Needs, check_kv_dtype, detect_platform, select_kernels, select_packing
from penstock.messages import MemoryRow, NewSequence, SamplingParams, StepPlan, Work
from penstock.priority import LOWEST, run_at
from penstock.runtime.device import HostDevice
from penstock.runtime.loading.allocator import keep_freed_memory
from penstock.runtime.loading.identity import identify
from penstock.runtime.loading.numa import interleave_memory
from penstock.runtime.loading.preload import Preload
from penstock.runtime.loading.transformers_probe import check_transformers
from penstock.runtime.loading.warmup import check_finite
from penstock.runtime.mesh.mesh import Mesh
from penstock.runtime.pages import KVPages
from penstock.runtime.runner import ModelRunner
from penstock.weights.digest import WeightsDigest
from penstock.weights.load import load_parameters

logger = logging.getLogger(__name__)


def load_cpu_runner(
    config: EngineConfig,
    place: RankPlace | None = None,
    rendezvous: str = "",
    num_blocks: Sequence[int] = (),
    *,
    preload: Preload | None = None,
    progress: bool = True,
) -> ModelRunner:
    """Sizes memory, reads the weights, allocates the KV pages and runs a first step.

    One rank of several reads its part of the weights, by `place`, and connects to the other ranks at `rendezvous` (see
    Mesh). `num_blocks` per KV group is what fits on every rank. Memory is sized here unless `num_blocks` or `preload`
    give the sizes.

    Raises DoesNotFit, CannotSplit and CannotQuantize before weights are read, UnsupportedModel, CheckpointError,
    OSError, or MeshError. Changes settings of the whole process (torch's number of threads, the allocator) and the NUMA
    policy of this thread and of threads that it starts.
    """
    hardware = detect_hardware()
    threads = config.threads or hardware.cores
    torch.set_num_threads(threads)
    keep_freed_memory()
    interleave_memory()
    folder = Path(config.model)
    place = place or RankPlace()
    whole = load_spec(folder) if preload is None else preload.spec
    spec = shard(whole, place)
    platform = detect_platform(config.device)
    if preload is None:
        num_blocks, memory = _memory(spec, config, num_blocks, hardware.memory_available, platform.isa)
    else:
        num_blocks, memory = preload.num_blocks, preload.memory.rows
    dtype = getattr(torch, config.dtype)
    needs = Needs(dtype, config.block_size, spec.head_dims)
    check_kv_dtype(platform, needs, config.kv_dtype)
    packing = select_packing(platform, needs, config.quantization, config.quantization_group) if spec.packed else None
    digest = WeightsDigest(folder) if place.rank == 0 else None
    reading = None if preload is None else preload.matrices

    def read() -> dict[str, Any]:
        return load_parameters(folder, spec, dtype, whole=whole, packing=packing, matrices=reading, progress=progress)

    parameters: dict[str, Any] = run_at(LOWEST, read) if config.replaces else read()
    if place.rank == 0:
        _warn_without_effect(config, whole, platform.isa)
    # The ranks connect after they have read the weights, so that they arrive at about the same time. Native kernels pin
    # this thread, and threads that it starts later inherit that: the weights' and the mesh's threads must run before.
    mesh = join_mesh(config, spec, place, rendezvous)
    kernels = select_kernels(platform, needs)
    if kernels.session:  # torch's threads would compete with the session's threads for the processors
        torch.set_num_threads(1)
    identity = identify(whole, digest, config, platform, kernels)
    pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype), rows=config.max_num_seqs)
    runner = ModelRunner(
        spec, parameters, kernels, config, pages, HostDevice(), identity=identity, memory=memory, mesh=mesh
    )
    seconds = _timed_first_step(runner, spec, config)
    _log_states(spec, config, pages)
    stored = stored_as(config, platform.isa if spec.packed else "", _stored(spec) if platform.isa else [])
    logger.info("weights in %s; %s; %s; first step in %.2f s", stored, kernels.summary, _team(threads), seconds)
    return runner


def join_mesh(config: EngineConfig, spec: ModelSpec, place: RankPlace, rendezvous: str) -> Mesh | None:
    """Connects the ranks of a model on CPUs. Returns None when there is one rank. Raises MeshError."""
    if place.split.world == 1:
        return None
    message_bytes = config.max_num_batched_tokens * spec.hidden_size * config.element_size
    return Mesh(place, rendezvous, message_bytes=message_bytes, timeout=config.step_deadline)


def _memory(
    spec: ModelSpec, config: EngineConfig, num_blocks: Sequence[int], available: int, isa: str
) -> tuple[Sequence[int], tuple[MemoryRow, ...]]:
    """Returns the KV blocks per group and the memory table."""
    facts = model_facts(spec).for_kernels(isa)
    if num_blocks:
        return num_blocks, memory_table(facts, config, num_blocks)
    plan = size_memory(facts, config, available)
    return plan.num_blocks, plan.rows


def _warn_without_effect(config: EngineConfig, whole: ModelSpec, isa: str) -> None:
    """Logs a warning if --quantization finds no matrix to quantise."""
    stored = _stored(whole)
    if config.quantization != "none" and all(map(codes_of, stored)):
        logger.warning(
            "--quantization %s has no effect: %s has no matrix of floats, %s",
            config.quantization,
            Path(config.model).name,
            stored_as(config, isa, stored),
        )


def _stored(spec: ModelSpec) -> list[Stored]:
    """Returns the codes of each section of a matrix that may be quantised."""
    return [stored for p in spec.parameters if p.kind not in ("vector", "router") for _, stored in p.sections]


def _log_states(spec: ModelSpec, config: EngineConfig, pages: KVPages) -> None:
    """Logs the size of a sequence's states, if the model has layers with states."""
    if spec.state_layers:
        each = format_bytes(pages.states.nbytes // config.max_num_seqs)
        logger.info("each sequence has states of %s: no prefix cache, no speculation", each)


def _team(threads: int) -> str:
    return f"{threads} threads" if threads > 1 else "1 thread"


def _timed_first_step(runner: ModelRunner, spec: ModelSpec, config: EngineConfig) -> float:
    """Runs a first step, or the check of a model with transformers' code, and returns its seconds."""
    began = time.perf_counter()
    if spec.transformers is not None:
        check_transformers(runner, config)
    else:
        _first_step(runner, min(config.max_model_len, 2))
    return time.perf_counter() - began


def _first_step(runner: ModelRunner, max_tokens: int) -> None:
    """Prefills a dummy sequence and drops it, so that libraries start their threads and allocate their buffers.

    Raises CheckpointError if its logits are not finite: an engine that is ready has computed a token.
    """
    blocks = tuple((1,) for _ in runner.capacity.groups)
    tokens = (0,) * min(max_tokens, runner.capacity.block_size)
    new = NewSequence(-1, tokens, len(tokens), 0, blocks, SamplingParams(seed=0, max_tokens=1), 0)
    check_finite(runner.execute(StepPlan(-1, (Work(-1, len(tokens), True),), (new,))))
    runner.execute(StepPlan(0, (), gone=(-1,)))
