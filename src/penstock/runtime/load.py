"""From a configuration to a runner that is ready to execute plans."""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.config import EngineConfig, Place, detect_hardware, settled_rows, size_memory, stored_as
from penstock.families import ModelSpec, load_spec, model_facts, shard
from penstock.kernels import Kernels, Needs, Platform, check_kv_dtype, detect_platform, select_kernels, select_packing
from penstock.kernels.native.packing import PackedWeight
from penstock.messages import MemoryRow, NewSequence, SamplingParams, StepPlan, Work
from penstock.runtime.heap import keep_freed_memory
from penstock.runtime.mesh import Mesh
from penstock.runtime.numa import interleave_memory
from penstock.runtime.runner import ModelRunner
from penstock.weights.load import load_parameters

SAMPLED_BYTES = 4096  # of each tensor, to tell one model's weights from another's

logger = logging.getLogger(__name__)


def load_runner(
    config: EngineConfig,
    place: Place | None = None,
    rendezvous: str = "",
    num_blocks: Sequence[int] = (),
    *,
    progress: bool = True,
) -> ModelRunner:
    """Size memory, read the weights, allocate the KV pages and run a first step.

    As the rank at `place`, of several: read its part, and meet the others at `rendezvous` (see Mesh). `num_blocks` per
    KV group is what all ranks have room for; then memory is not sized here.

    Raises DoesNotFit, CannotSplit and CannotQuantize before anything is read, UnsupportedModel, CheckpointError,
    OSError, or MeshError. The number of threads and the allocator's settings that it changes are the whole process's;
    where memory lies, this thread's and those it starts.
    """
    hardware = detect_hardware()
    torch.set_num_threads(config.threads or hardware.cores)
    keep_freed_memory()
    interleave_memory()
    folder = Path(config.model)
    place = place or Place()
    whole = load_spec(folder)
    spec = shard(whole, place)
    num_blocks, memory = _memory(spec, config, num_blocks, hardware.memory_available)
    dtype = getattr(torch, config.dtype)
    platform = detect_platform(config.device)
    head_dims = tuple(layer.head_dim for layer in spec.layers)
    needs = Needs(dtype, config.block_size, head_dims)
    packing = select_packing(platform, needs, config.quantization, config.quantization_group)
    check_kv_dtype(platform, needs, config.kv_dtype)
    parameters = load_parameters(folder, spec, dtype, of=whole, packing=packing, progress=progress)
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
    warm_up(runner)
    logger.info(
        "weights in %s; kernels on %s %s: %s; first step in %.2f s",
        stored_as(config),
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
        return num_blocks, settled_rows(facts, config, num_blocks)
    plan = size_memory(facts, config, available)
    return plan.num_blocks, plan.rows


def cache_root(
    spec: ModelSpec, parameters: Mapping[str, Any], config: EngineConfig, platform: Platform, kernels: Kernels
) -> str:
    """What keys and values depend on besides the tokens, as JSON: the weights' revision, the pages' type and layout,
    and all that may change a bit of them."""
    digest = hashlib.sha256(repr(spec).encode())
    for name in sorted(parameters):
        parameter = parameters[name]
        for tensor in parameter.tensors if isinstance(parameter, PackedWeight) else (parameter,):
            flat = tensor.view(-1)[: SAMPLED_BYTES // tensor.itemsize]
            digest.update(flat.view(torch.uint8).numpy().tobytes())
    root = {
        "weights": [config.revision, stored_as(config), digest.hexdigest()],
        "kv": [config.kv_dtype, "block,layer,kv,head,token,dim", config.block_size],
        "numerics": [
            torch.__version__,
            platform.device,
            platform.capability,
            torch.get_num_threads(),
            kernels.fingerprint,
        ],
    }
    return json.dumps(root, sort_keys=True)


def warm_up(runner: ModelRunner) -> None:
    """A step over a made-up sequence, which is forgotten: libraries start their threads and allocate what they keep."""
    blocks = tuple((1, 2)[: group.num_blocks - 1] for group in runner.capacity.groups)
    tokens = (0,) * min(2, runner.capacity.block_size)
    new = NewSequence(-1, tokens, len(tokens), 0, blocks, SamplingParams(seed=0, max_tokens=1), 0)
    runner.execute(StepPlan(-1, (Work(-1, len(tokens), True),), (new,)))
    runner.execute(StepPlan(0, (), gone=(-1,)))
