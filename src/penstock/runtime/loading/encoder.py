"""Loads an encoder: reads the weights and packs its matrices."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from penstock.config import EngineConfig, detect_hardware, stored_as
from penstock.config.weights import cpu_format
from penstock.families import ModelSpec
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels import Needs, detect_platform, select_kernels
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.session import native_session
from penstock.messages import MemoryRow, NewSequence, PoolingParams, SamplingParams, StepPlan, Work
from penstock.models.encoder import Encoder
from penstock.runtime.encoder_runner import EncoderRunner
from penstock.runtime.loading.allocator import keep_freed_memory
from penstock.runtime.loading.identity import identify
from penstock.runtime.programs.recorded_encoder import RecordedEncoder
from penstock.weights.digest import WeightsDigest
from penstock.weights.load import load_parameters

logger = logging.getLogger(__name__)


def load_encoder(
    config: EngineConfig, spec: ModelSpec, memory: Sequence[MemoryRow], *, progress: bool = True
) -> EncoderRunner:
    """Reads an encoder's weights and runs a first step. Changes settings of the whole process: torch's number of
    threads, and the allocator.

    Raises CheckpointError, also if the vectors are not finite.
    """
    threads = config.threads or detect_hardware().cores
    torch.set_num_threads(threads)
    keep_freed_memory()
    dtype = getattr(torch, config.dtype)
    digest = WeightsDigest(Path(config.model))
    parameters = load_parameters(Path(config.model), spec, dtype, progress=progress)
    head_dims = tuple(layer.attention.head_dim for layer in spec.layers)  # type: ignore[attr-defined]
    platform = detect_platform()
    kernels = select_kernels(platform, Needs(dtype, head_dims=head_dims))
    if config.quantization == "int8":
        fmt = cpu_format("matrix", (), config.dtype, config.quantization, 0, platform.isa)
        kernels = replace(kernels, linear=NativeLinear(native_session(threads=threads), fmt))
    model, forward = Encoder(spec, parameters, kernels), None
    if kernels.session:
        torch.set_num_threads(1)  # torch's threads would compete with the session's for the processors
        if model.recordable:
            recorded = RecordedEncoder(model, kernels.session, spec.hidden_size, dtype, config.max_model_len)
            forward = recorded.forward
    identity = identify(spec, digest, config, platform, kernels)
    runner = EncoderRunner(model, config, spec, memory, identity=identity, forward=forward)
    began = time.perf_counter()
    _first_step(runner)
    logger.info(
        "weights in %s; %s; first step in %.2f s", stored_as(config), kernels.summary, time.perf_counter() - began
    )
    return runner


def _first_step(runner: EncoderRunner) -> None:
    """Computes a text of one token, so that libraries start their threads."""
    new = NewSequence(-1, (0,), 1, 0, ((1,),), SamplingParams(seed=0, max_tokens=1), 0, pooling=PoolingParams())
    result = runner.execute(StepPlan(-1, (Work(-1, 1, True),), (new,)))
    runner.execute(StepPlan(0, (), gone=(-1,)))
    if result.results[0].error:
        raise CheckpointError(
            "the model's vectors are not finite. The weights are damaged, or too large for the dtype: download them "
            "again, or set --dtype float32"
        )
