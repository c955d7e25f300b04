"""What a resident batch's step takes beside the model: its inputs made, a token chosen, the rows moved on.

The Triton kernels do it on a GPU. In torch and NumPy it is what they are held against, and what stands in for them
where there is no GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention import AttentionBatch, ReferenceAttention, TorchPages
from penstock.kernels.resident import (
    CHOSEN,
    NOT_FINITE,
    Chosen,
    EditParameters,
    Parameters,
    Prepared,
    ResidentRows,
    StepArrays,
    describe,
)
from penstock.runtime.logprobs import pack_logprobs
from penstock.runtime.numpy_chooser import NumPyChooser
from penstock.runtime.sampling_batch import SamplingBatch


@dataclass(frozen=True)
class StepKernels:
    """See the functions below, and for what they mean those of the same names in kernels/triton/."""

    fill: Callable[[ResidentRows, StepArrays, int, int], None]
    advance: Callable[[ResidentRows, StepArrays, int, Tensor], None]
    edit: Callable[[Tensor, Tensor, Tensor, EditParameters, Tensor, Tensor, Tensor], None]
    survey: Callable[[Tensor, Tensor, Parameters], Any]
    sample: Callable[..., Chosen]
    pack_logprobs: Callable[[Tensor, Tensor, Any, int], Tensor]


def triton_step() -> StepKernels:
    """The kernels of kernels/triton/. Imports triton."""
    from penstock.kernels.triton.edits import edit
    from penstock.kernels.triton.inputs import advance, fill
    from penstock.kernels.triton.logprobs import pack_logprobs
    from penstock.kernels.triton.sampling import sample
    from penstock.kernels.triton.survey import Survey

    return StepKernels(fill, advance, edit, Survey.of, sample, pack_logprobs)


def torch_step() -> StepKernels:
    """The same on a CPU, from torch and NumPy."""
    return StepKernels(_fill, _advance, _edit, _survey, _sample, _pack_logprobs)


class ResidentAttention(TorchPages):
    """kernels/triton/attention.py for a batch that is resident on a CPU: reads contexts and tables where the step's
    kernels left them."""

    reads_whole_blocks = False

    def prepare(self, batch: AttentionBatch, keys: Tensor) -> Prepared:
        lengths, count = batch.query_lens, len(batch.context_lens)
        sequences, decodes = describe(lengths, batch.query_start[:-1], batch.context_lens, np.arange(count))
        tables = torch.from_numpy(batch.block_tables.astype(np.int32))
        several = lengths[lengths > 1]
        bounds = int(several.sum()), int(several.max(initial=0))
        return Prepared(batch.window, torch.from_numpy(sequences), tables, decodes, count - decodes, *bounds)

    def store(
        self,
        qkv: Tensor,
        heads: int,
        weight: Tensor | None,
        rotation: tuple[Tensor, Tensor],
        keys: Tensor,
        values: Tensor,
        blocks: Tensor,
        offsets: Tensor,
        eps: float,
        offset: float,
    ) -> Tensor:
        kept = blocks >= 0  # padding is not
        cos, sin = rotation
        stored = super().store(
            qkv[kept], heads, weight, (cos[kept], sin[kept]), keys, values, blocks[kept], offsets[kept], eps, offset
        )
        query = stored.new_zeros(len(qkv), *stored.shape[1:])
        query[kept] = stored
        return query

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, prepared: Prepared, scale: float) -> Tensor:
        count = prepared.decodes + prepared.prompts
        first, length, context, row, _ = prepared.sequences[:5, :count].numpy().astype(np.int64)
        real = np.flatnonzero(context)
        order = real[np.argsort(first[real])]  # that of the step's tokens; padding comes behind
        start = np.concatenate([[0], np.cumsum(length[order])])
        tables = prepared.tables.numpy()[row[order]].astype(np.int64)
        batch = AttentionBatch(keys.shape[2], prepared.window, start, context[order], tables)
        out = torch.zeros_like(query)
        out[: start[-1]] = ReferenceAttention()(query[: start[-1]], keys, values, batch, scale)
        return out


def _fill(state: ResidentRows, step: StepArrays, count: int, block_size: int) -> None:
    for sequence in range(count):
        first, length, _, row, *_ = step.sequences[:, sequence].tolist()
        tokens = slice(first, first + length)
        if row < 0:
            step.sequences[2, sequence] = 0
            step.token_ids[tokens] = step.positions[tokens] = step.offsets[tokens] = 0
            step.blocks[:, tokens] = -1
            continue
        before = int(state.computed[row])
        step.sequences[2, sequence] = before + length
        position = torch.arange(before, before + length)
        step.token_ids[tokens] = state.token_ids[row, position].long()
        step.positions[tokens] = position
        step.offsets[tokens] = position % block_size
        step.blocks[:, tokens] = state.tables[:, row, position // block_size].long()


def _advance(state: ResidentRows, step: StepArrays, count: int, sampled: Tensor) -> None:
    for _, _, context, row, _, index in step.sequences[:, :count].T.tolist():
        if row >= 0:
            state.computed[row] = context
            if index >= 0:
                state.token_ids[row, context] = sampled[index]


def _edit(
    logits: Tensor,
    which: Tensor,
    rows: Tensor,
    parameters: EditParameters,
    token_ids: Tensor,
    prompts: Tensor,
    outputs: Tensor,
) -> None:
    for place in which.tolist():
        row, line = int(rows[place]), logits[place]
        done, prompt = int(outputs[row]), int(prompts[row])
        biased = int(parameters.bias_count[row])
        line[parameters.bias_ids[row, :biased].long()] += parameters.biases[row, :biased]
        repetition, presence, frequency = (
            getattr(parameters, name)[row] for name in ("repetition", "presence", "frequency")
        )
        if repetition != 1 or presence != 0 or frequency != 0:
            tokens = token_ids[row, : prompt + done].long()
            seen = tokens.unique()
            times = torch.bincount(tokens[prompt:], minlength=len(line))[seen].float()
            value = line[seen]
            value = torch.where(value < 0, value * repetition, value / repetition)
            line[seen] = value - (frequency * times + presence * (times > 0))
        if done < parameters.min_tokens[row]:
            line[parameters.ban_ids[row, : int(parameters.ban_count[row])].long()] = -torch.inf


def _survey(logits: Tensor, rows: Tensor, parameters: Parameters) -> None:
    """There is nothing to know beforehand here."""


def _sample(logits: Tensor, rows: Tensor, parameters: Parameters, survey: None, *, filtered: bool) -> Chosen:
    batch = SamplingBatch(logits.shape[1], len(parameters.kind))
    for name in ("kind", "temperature", "top_k", "top_p", "min_p"):
        getattr(batch, name)[:] = getattr(parameters, name).numpy()
    batch.streams[:] = parameters.streams.numpy().view(np.uint64)
    batch.num_outputs[:] = parameters.outputs.numpy()
    which = rows.numpy().astype(np.int64)
    sampled = NumPyChooser(batch)(logits.clone(), which)
    status = torch.full((len(which),), CHOSEN, dtype=torch.int32)
    status[list(sampled.errors)] = NOT_FINITE
    parameters.outputs[rows[status == CHOSEN].long()] += 1
    return Chosen(torch.tensor(sampled.token_ids, dtype=torch.int64), status)


def _pack_logprobs(logits: Tensor, tokens: Tensor, survey: None, k: int) -> Tensor:
    count = len(tokens)
    logits = logits.masked_fill(logits.isnan(), 0.0)  # of a row that fails: what is packed then is read by nobody
    packed = pack_logprobs(logits.numpy(), np.arange(count), tokens.numpy(), np.full(count, k))
    words = np.frombuffer(b"".join(packed), np.int32).reshape(count, 3 + 2 * k)
    return torch.from_numpy(words.copy())
