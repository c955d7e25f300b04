"""From a configuration to a runner on this machine's processor: memory is sized, weights are read and packed."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.config import EngineConfig, Place, detect_hardware, memory_table, size_memory, stored_as
from penstock.families import ModelSpec, load_spec, model_facts, shard
from penstock.kernels import Needs, check_kv_dtype, detect_platform, select_kernels, select_packing
from penstock.messages import MemoryRow, NewSequence, SamplingParams, StepPlan, Work
from penstock.runtime.device import HostDevice
from penstock.runtime.loading.allocator import keep_freed_memory
from penstock.runtime.loading.cache_root import cache_root
from penstock.runtime.loading.numa import interleave_memory
from penstock.runtime.loading.preload import Preload
from penstock.runtime.mesh.mesh import Mesh
from penstock.runtime.pages import KVPages
from penstock.runtime.runner import ModelRunner
from penstock.weights.load import load_parameters

logger = logging.getLogger(__name__)


def load_cpu_runner(
    config: EngineConfig,
    place: Place | None = None,
    rendezvous: str = "",
    num_blocks: Sequence[int] = (),
    *,
    preload: Preload | None = None,
    progress: bool = True,
) -> ModelRunner:
    """Size memory, read the weights, allocate the KV pages and run a first step.

    As one rank of several it reads the part at `place`, and meets the other ranks at `rendezvous` (see Mesh).
    `num_blocks` per KV group is what all ranks have room for. Memory is sized here unless `num_blocks` or `preload`
    say the result.

    Raises DoesNotFit, CannotSplit and CannotQuantize before anything is read, UnsupportedModel, CheckpointError,
    OSError, or MeshError. Changes settings of the whole process: the number of threads and the allocator's; and where
    memory of this thread, and those it starts, lies.
    """
    hardware = detect_hardware()
    torch.set_num_threads(config.threads or hardware.cores)
    keep_freed_memory()
    interleave_memory()
    folder = Path(config.model)
    place = place or Place()
    whole = load_spec(folder)
    spec = shard(whole, place)
    if preload is None:
        num_blocks, memory = _memory(spec, config, num_blocks, hardware.memory_available)
    else:
        num_blocks, memory = preload.memory.num_blocks, preload.memory.rows
    dtype = getattr(torch, config.dtype)
    platform = detect_platform(config.device)
    needs = Needs(dtype, config.block_size, spec.head_dims)
    check_kv_dtype(platform, needs, config.kv_dtype)
    packing = select_packing(platform, needs, config.quantization, config.quantization_group)
    reading = None if preload is None else preload.matrices
    parameters = load_parameters(folder, spec, dtype, whole=whole, packing=packing, matrices=reading, progress=progress)
    # After the weights, so that ranks come together at about one time; before threads are pinned, as it has its own.
    mesh = None
    if place.split.world > 1:
        message = config.max_num_batched_tokens * spec.hidden_size * config.element_size
        mesh = Mesh(place, rendezvous, message_bytes=message, timeout=config.step_deadline)
    # After the weights: native kernels pin this thread, and threads that read weights would inherit that.
    kernels = select_kernels(platform, needs)
    if kernels.session:  # torch's threads would compete with its threads for the processors
        torch.set_num_threads(1)
    root = cache_root(spec, parameters, config, platform, kernels)
    pages = KVPages(spec, num_blocks, config.block_size, getattr(torch, config.kv_dtype))
    runner = ModelRunner(
        spec, parameters, kernels, config, pages, HostDevice(), cache_root=root, memory=memory, mesh=mesh
    )
    began = time.perf_counter()
    _first_step(runner, min(config.max_model_len, 2))
    logger.info(
        "weights in %s; kernels on %s %s: %s; first step in %.2f s",
        stored_as(config, platform.isa),
        platform.device,
        platform.capability,
        kernels.fingerprint,
        time.perf_counter() - began,
    )
    return runner


def _memory(
    spec: ModelSpec, config: EngineConfig, num_blocks: Sequence[int], available: int
) -> tuple[Sequence[int], tuple[MemoryRow, ...]]:
    """Returns KV blocks per group and the memory table."""
    facts = model_facts(spec)
    if num_blocks:
        return num_blocks, memory_table(facts, config, num_blocks)
    plan = size_memory(facts, config, available)
    return plan.num_blocks, plan.rows


def _first_step(runner: ModelRunner, tokens_at_most: int) -> None:
    """Run a step over a made-up sequence, which is forgotten: libraries start threads and allocate what they keep."""
    blocks = tuple((1,) for _ in runner.capacity.groups)
    tokens = (0,) * min(tokens_at_most, runner.capacity.block_size)
    new = NewSequence(-1, tokens, len(tokens), 0, blocks, SamplingParams(seed=0, max_tokens=1), 0)
    runner.execute(StepPlan(-1, (Work(-1, len(tokens), True),), (new,)))
    runner.execute(StepPlan(0, (), gone=(-1,)))
