"""Makes the parts of a ModelRunner: the limits of a step, the batch, the sampler, the step kernels and the step."""

from collections.abc import Sequence

from penstock.config import EngineConfig
from penstock.config.graphs import graph_sizes
from penstock.families import ModelSpec
from penstock.kernels import Kernels
from penstock.kernels.batch_arrays import BatchRows
from penstock.kernels.native.attention import AttentionWork
from penstock.runtime.batch import ResidentBatch
from penstock.runtime.device import Device
from penstock.runtime.native_step import NativeStep
from penstock.runtime.programs.recorded import RecordedStep
from penstock.runtime.prompt_slices import PROMPT_LOGPROB_ROWS
from penstock.runtime.sampling.sampler import Sampler
from penstock.runtime.sampling.watermark import Watermark
from penstock.runtime.step import EagerStep, ModelStep, StepLimits
from penstock.runtime.step_kernels import ReferenceStep, StepKernels, triton_step


def limits_of_step(config: EngineConfig) -> StepLimits:
    sequences, tokens = config.max_num_seqs, max(config.max_num_batched_tokens, config.max_num_seqs)
    return StepLimits(sequences, tokens, config.num_speculative_tokens, sequences + config.max_step_drafts)


def captured_sizes(spec: ModelSpec, config: EngineConfig, device: Device) -> Sequence[int]:
    """The numbers of sequences for which decode steps are captured as CUDA graphs. Empty where none is."""
    if config.enforce_eager or device.shared or spec.pooling is not None:
        return ()
    return graph_sizes(config.max_num_seqs)


def make_batch(spec: ModelSpec, config: EngineConfig, device: Device) -> ResidentBatch:
    # An embedding model's vector counts as a token after the prompt, because each step moves its rows on by one.
    longest = config.max_model_len + (spec.pooling is not None)
    groups = len(spec.windows)
    return ResidentBatch(config.max_num_seqs, longest, config.block_size, groups, device.where, shared=device.shared)


def make_sampler(spec: ModelSpec, config: EngineConfig, device: Device, limits: StepLimits) -> Sampler:
    return Sampler(
        spec.vocabulary,
        limits.sequences,
        device.where,
        shared=device.shared,
        logit_rows=limits.logit_rows,
        marked=config.watermark != "none",
    )


def make_step_kernels(
    spec: ModelSpec, config: EngineConfig, kernels: Kernels, device: Device, limits: StepLimits, batch: ResidentBatch
) -> tuple[StepKernels, Sequence[AttentionWork]]:
    """The step kernels of the device, and what attention in a recorded step reads, per KV group; else nothing."""
    watermark = None if config.watermark == "none" else Watermark.of(config.watermark, config.watermark_key)
    if kernels.session is not None:
        blocks = batch.tables.shape[2]
        attention = [AttentionWork(limits.sequences, limits.tokens, blocks, window) for window in spec.windows]
        return NativeStep(kernels.session, attention, watermark), attention
    return (ReferenceStep(watermark) if device.where.type == "cpu" else triton_step(watermark)), ()


def recorded_or_eager(
    eager: EagerStep,
    spec: ModelSpec,
    kernels: Kernels,
    step_kernels: StepKernels,
    attention: Sequence[AttentionWork],
    state: BatchRows,
    sampler: Sampler | None,
) -> ModelStep:
    """The recording of `eager` if native kernels compute the whole model, else `eager`."""
    if not isinstance(step_kernels, NativeStep) or kernels.session is None:
        return eager
    if spec.pooling is not None or not eager.recordable:
        return eager
    return RecordedStep(
        eager,
        step_kernels,
        kernels.session,
        attention,
        state.token_ids,
        sampler,
        scored=PROMPT_LOGPROB_ROWS,
    )
