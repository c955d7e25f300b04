"""From a configuration to a runner that is ready to execute plans. What is special to a GPU is in load_device.py."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.config import EngineConfig, Place, detect_hardware, memory_table, size_memory, stored_as
from penstock.families import ModelSpec, load_spec, model_facts, shard
from penstock.kernels import Needs, check_kv_dtype, detect_platform, select_kernels, select_packing
from penstock.messages import MemoryRow, NewSequence, SamplingParams, StepPlan, Work
from penstock.runtime.cache_root import cache_root
from penstock.runtime.groundwork import Groundwork
from penstock.runtime.heap import keep_freed_memory
from penstock.runtime.mesh import Mesh
from penstock.runtime.numa import interleave_memory
from penstock.runtime.runner import ModelRunner
from penstock.weights.load import load_parameters

if TYPE_CHECKING:
    from penstock.runtime.device_runner import DeviceRunner

logger = logging.getLogger(__name__)


def load_runner(
    config: EngineConfig, groundwork: Groundwork | None = None, *, progress: bool = True
) -> "ModelRunner | DeviceRunner":
    """Of a whole model, on the configuration's device. Raises what `load_host_runner` and `load_gpu_runner` do."""
    if config.device == "cuda":
        from penstock.runtime.load_device import load_gpu_runner  # here and not above: a CPU needs none of it

        return load_gpu_runner(config, progress=progress)
    return load_host_runner(config, groundwork=groundwork, progress=progress)


def load_host_runner(
    config: EngineConfig,
    place: Place | None = None,
    rendezvous: str = "",
    num_blocks: Sequence[int] = (),
    *,
    groundwork: Groundwork | None = None,
    progress: bool = True,
) -> ModelRunner:
    """Size memory, read the weights, allocate the KV pages and run a first step.

    As the rank at `place`, of several: read its part, and meet the others at `rendezvous` (see Mesh). `num_blocks` per
    KV group is what all ranks have room for; then memory is not sized here, nor where `groundwork` has done so.

    Raises DoesNotFit, CannotSplit and CannotQuantize before anything is read, UnsupportedModel,
    CheckpointError, OSError, or MeshError. The number of threads and the allocator's settings that it changes are the
    whole process's; where memory lies, this thread's and those it starts.
    """
    hardware = detect_hardware()
    torch.set_num_threads(config.threads or hardware.cores)
    keep_freed_memory()
    interleave_memory()
    folder = Path(config.model)
    place = place or Place()
    whole = load_spec(folder)
    spec = shard(whole, place)
    if groundwork is None:
        num_blocks, memory = _memory(spec, config, num_blocks, hardware.memory_available)
    else:
        num_blocks, memory = groundwork.memory.num_blocks, groundwork.memory.rows
    dtype = getattr(torch, config.dtype)
    platform = detect_platform(config.device)
    needs = Needs(dtype, config.block_size, spec.head_dims)
    check_kv_dtype(platform, needs, config.kv_dtype)
    packing = select_packing(platform, needs, config.quantization, config.quantization_group)
    begun = None if groundwork is None else groundwork.matrices
    parameters = load_parameters(folder, spec, dtype, whole=whole, packing=packing, matrices=begun, progress=progress)
    # With the weights read, so that nobody waits long for a step; and before threads are pinned, as it has its own.
    mesh = None
    if place.split.world > 1:
        message = config.max_num_batched_tokens * spec.hidden_size * config.element_size
        mesh = Mesh(place, rendezvous, message_bytes=message, timeout=config.step_deadline)
    # After the weights: native kernels pin this thread, and readers that it starts would inherit that.
    kernels = select_kernels(platform, needs)
    if kernels.session:  # it has the threads; torch's would only fight them for the processors
        torch.set_num_threads(1)
    root = cache_root(spec, parameters, config, platform, kernels)
    runner = ModelRunner(spec, parameters, kernels, config, num_blocks, cache_root=root, memory=memory, mesh=mesh)
    began = time.perf_counter()
    warm_up(runner, min(config.max_model_len, 2))
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
    """(KV blocks per group, the memory table)."""
    facts = model_facts(spec)
    if num_blocks:
        return num_blocks, memory_table(facts, config, num_blocks)
    plan = size_memory(facts, config, available)
    return plan.num_blocks, plan.rows


def warm_up(runner: ModelRunner, tokens_at_most: int) -> None:
    """A step over a made-up sequence, which is forgotten: libraries start their threads and allocate what they keep."""
    blocks = tuple((1,) for _ in runner.capacity.groups)
    tokens = (0,) * min(tokens_at_most, runner.capacity.block_size)
    new = NewSequence(-1, tokens, len(tokens), 0, blocks, SamplingParams(seed=0, max_tokens=1), 0)
    runner.execute(StepPlan(-1, (Work(-1, len(tokens), True),), (new,)))
    runner.execute(StepPlan(0, (), gone=(-1,)))
