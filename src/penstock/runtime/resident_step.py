"""A step of a batch that lives on the device: from what the host says of it to hidden states, tokens, and the rows
moved on. Everything it works on stays at one place, so that it can be captured."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.resident import Prepared, ResidentRows, StepArrays, describe_units
from penstock.models import Decoder, GroupInput, LayerCache, StepInput
from penstock.runtime.inputs import Segments
from penstock.runtime.resident import Change
from penstock.runtime.step_kernels import StepKernels

LINES = 8  # of what is sent of a step: six of its sequences, the rows of its logits, the tokens these are computed from


class Shape(NamedTuple):
    """Of a step, padding included."""

    sequences: int
    tokens: int
    decodes: int  # sequences of one token
    prompt_tokens: int  # of all others
    longest: int  # of these


class ResidentStep:
    """One step at a time: the next is described when this one has been launched."""

    def __init__(
        self,
        model: Decoder,
        kernels: StepKernels,
        state: ResidentRows,
        caches: Sequence[LayerCache],
        windows: Sequence[int],
        *,
        block_size: int,
        sequences: int,
        tokens: int,
        spare: int,
    ) -> None:
        """For at most so many sequences and tokens. `windows` are those of the KV groups; `spare` is the sampler's row
        for padding."""
        self._model = model
        self._kernels = kernels
        self._state = state
        self._caches = caches
        self._windows = tuple(windows)
        self._block_size = block_size
        self._spare = spare
        device = state.token_ids.device
        self._described = torch.zeros(LINES, sequences, dtype=torch.int32, device=device)
        self._no_tokens = torch.zeros(1, dtype=torch.int64, device=device)
        arrays = StepArrays.empty(1, tokens, len(self._windows), device)
        self.arrays = StepArrays(self._described[:6], arrays.token_ids, arrays.positions, arrays.blocks, arrays.offsets)

    def describe(self, units: Segments, padding: int = 0) -> tuple[Shape, Change]:
        """What is to be sent of a step. Padding is as of `describe_units`."""
        described, decodes = describe_units(units.rows, units.length, units.sample, padding)
        count = described.shape[1]
        sampled = units.rows[units.sample]
        lines = np.zeros((LINES, count), np.int32)
        lines[:6] = described
        lines[6] = self._spare
        lines[6, : len(sampled)] = sampled
        lines[7, : len(sampled)] = units.offset[1:][units.sample] - 1
        several = units.length[units.length > 1]
        shape = Shape(count, units.tokens + padding, decodes, int(several.sum()), int(several.max(initial=0)))
        return shape, Change((lines,), lambda sent: self._write(*sent))

    def _write(self, lines: Tensor) -> None:
        self._described[:, : lines.shape[1]] = lines

    def rows(self, count: int) -> Tensor:
        """Those of the batch that the step's first `count` rows of logits are of."""
        return self._described[6, :count]

    def forward(self, shape: Shape) -> Tensor:
        """Hidden states [tokens, hidden]."""
        arrays, state, tokens = self.arrays, self._state, shape.tokens
        self._kernels.fill(state, arrays, shape.sequences, self._block_size)
        groups = [
            GroupInput(
                Prepared(
                    window,
                    arrays.sequences,
                    state.tables[group],
                    shape.decodes,
                    shape.sequences - shape.decodes,
                    shape.prompt_tokens,
                    shape.longest,
                ),
                arrays.blocks[group, :tokens],
                arrays.offsets[:tokens],
            )
            for group, window in enumerate(self._windows)
        ]
        inputs = StepInput(arrays.token_ids[:tokens], arrays.positions[:tokens], tuple(groups))
        return self._model.forward(inputs, self._caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [rows, vocab] of rows of hidden states."""
        logits = self._model.logits(hidden)
        if logits is None:
            raise RuntimeError("a resident batch is whole: its model cannot be a rank's part")
        return logits

    def last_logits(self, hidden: Tensor, count: int) -> Tensor:
        """Of the `count` rows of the step's hidden states that are sampled."""
        return self.logits(hidden.index_select(0, self._described[7, :count]))

    def advance(self, shape: Shape, tokens: Tensor | None) -> None:
        """The rows have computed the step's tokens; int64 `tokens` follow those that sampled, None where none did."""
        self._kernels.advance(self._state, self.arrays, shape.sequences, self._no_tokens if tokens is None else tokens)
