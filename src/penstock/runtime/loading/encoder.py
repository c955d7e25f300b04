"""Loads an encoder: reads the weights and packs its matrices."""

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.config import EngineConfig, detect_hardware, stored_as
from penstock.families import ModelSpec
from penstock.families.checkpoint.stored import CheckpointError
from penstock.kernels.linear import TorchLinear
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.session import native_session
from penstock.kernels.prepacked import ActivatedLinear, PrepackedLinear, SeparateActivation
from penstock.messages import MemoryRow, NewSequence, PoolingParams, SamplingParams, StepPlan, Work
from penstock.models.encoder import Encoder
from penstock.runtime.encoder_runner import EncoderRunner
from penstock.runtime.loading.allocator import keep_freed_memory
from penstock.runtime.loading.cache_root import weights_digest
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
    parameters = load_parameters(Path(config.model), spec, getattr(torch, config.dtype), progress=progress)
    root = json.dumps([torch.__version__, stored_as(config), weights_digest(spec, parameters)])
    linear: ActivatedLinear = PrepackedLinear() if PrepackedLinear.available() else SeparateActivation(TorchLinear())
    if config.quantization == "int8":
        linear = SeparateActivation(NativeLinear(native_session(threads=threads), quantized=True))
        torch.set_num_threads(1)  # torch's threads would compete with the session's for the processors
    runner = EncoderRunner(Encoder(spec, parameters, linear), config, spec, memory, cache_root=root)
    began = time.perf_counter()
    _first_step(runner)
    logger.info(
        "weights in %s; torch's kernels%s; first step in %.2f s",
        stored_as(config),
        ", native products" if config.quantization == "int8" else "",
        time.perf_counter() - began,
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
