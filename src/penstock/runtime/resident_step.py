"""A step of a batch that lives on the device: from what the host says of it to hidden states, tokens, and the rows
moved on. Everything it works on stays at one place, so that it can be captured."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.resident import Prepared, ResidentRows, StepArrays, describe_units
from penstock.models import Decoder, GroupInput, Hidden, LayerCache, StepInput
from penstock.runtime.inputs import Segments
from penstock.runtime.mesh import Mesh
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
    """One step at a time: the next is described when this one has been launched. With a mesh it is a rank's part of
    one, and all ranks take the same steps."""

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
        hidden_size: int,
        dtype: torch.dtype,
        mesh: Mesh | None = None,
    ) -> None:
        """For at most so many sequences and tokens. `windows` are those of the KV groups; `dtype` is that of hidden
        states."""
        self._model = model
        self._kernels = kernels
        self._state = state
        self._caches = caches
        self._windows = tuple(windows)
        self._block_size = block_size
        self._spare = sequences  # the sampler's row for padding: behind all others
        device = state.token_ids.device
        self._described = torch.zeros(LINES, sequences, dtype=torch.int32, device=device)
        self._mesh = mesh
        self.last = mesh is None or mesh.place.last  # whether there is a head here
        self._no_hidden = torch.zeros(0, hidden_size, dtype=dtype, device=device)
        first = mesh is None or mesh.place.first
        self._hidden = None if first else self.hidden_states(tokens)  # where what the stage before gives is put
        self._tokens = torch.zeros(sequences, dtype=torch.int64, device=device)  # where another rank samples them
        self.arrays = replace(StepArrays.empty(1, tokens, len(windows), device), sequences=self._described[:6])

    def describe(self, units: Segments, padding: int = 0) -> tuple[Shape, Change]:
        """What is to be sent of a step. Padding is as of `describe_units`."""
        if not self.last:  # nothing is sampled here
            units = units._replace(sample=np.zeros_like(units.sample))
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

    def hidden_states(self, count: int) -> Tensor:
        """Memory for them: [count, hidden]."""
        return self._no_hidden.new_zeros(count, self._no_hidden.shape[1])

    def rows(self, count: int) -> Tensor:
        """Those of the batch that the step's first `count` rows of logits are of."""
        return self._described[6, :count]

    def receive(self, shape: Shape) -> None:
        """What the stage before gives, if there is one. No part of a captured step."""
        if self._mesh is not None and self._hidden is not None:
            self._mesh.receive(self._hidden[: shape.tokens])

    def send(self, states: Tensor) -> None:
        """To the next stage, if there is one: its hidden states, padding included. No part of a captured step."""
        if self._mesh is not None and not self.last:
            self._mesh.send(states)

    def forward(self, shape: Shape, planned: Sequence[Any] = ()) -> Hidden:
        """As of Decoder.forward. `planned` is what attention that plans on the host made of each KV group."""
        arrays, state, tokens = self.arrays, self._state, shape.tokens
        self._kernels.fill(state, arrays, shape.sequences, self._block_size)
        seen = planned or [
            Prepared(
                window,
                arrays.sequences,
                state.tables[group],
                shape.decodes,
                shape.sequences - shape.decodes,
                shape.prompt_tokens,
                shape.longest,
            )
            for group, window in enumerate(self._windows)
        ]
        offsets = arrays.offsets[:tokens]
        groups = [GroupInput(each, arrays.blocks[group, :tokens], offsets) for group, each in enumerate(seen)]
        hidden = None if self._hidden is None else self._hidden[:tokens]
        inputs = StepInput(arrays.token_ids[:tokens], arrays.positions[:tokens], tuple(groups), hidden)
        return self._model.forward(inputs, self._caches)

    def logits(self, hidden: Hidden) -> Tensor | None:
        """As of Decoder.logits."""
        return self._model.logits(hidden)

    def last_logits(self, hidden: Hidden, count: int) -> Tensor | None:
        """Of the `count` of the step's tokens that are sampled after."""
        return self.logits(hidden[self._described[7, :count]])

    def advance(self, shape: Shape, sampled: int, tokens: Tensor | None = None) -> None:
        """The rows have computed the step's tokens, and `sampled` of them are each followed by one: int64 `tokens`
        [sampled], which the ranks of the stage that do not sample get from the one that does."""
        if tokens is None:
            tokens = self._tokens[: max(sampled, 1)]
        if sampled and self._mesh is not None and self.last:
            self._mesh.share(tokens)
        self._kernels.advance(self._state, self.arrays, shape.sequences, tokens)
