"""Executes a step of the resident batch on the device: forward pass, logits, the choice of tokens, and `advance`, which
appends these tokens to the batch's rows.

All arrays of a step keep their addresses, so that the step can be captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.batch_arrays import (
    AHEAD,
    LOGIT_LINES,
    ROW,
    TOKEN,
    BatchRows,
    StepArrays,
    StepSequences,
    order_units,
    pad_units,
)
from penstock.messages import Window
from penstock.models import GroupInput, Hidden, LanguageModel, LayerCache, StepInput
from penstock.runtime.device import Change, StepOutputs
from penstock.runtime.mesh.mesh import Mesh
from penstock.runtime.sampling.sampler import Sampler
from penstock.runtime.step_kernels import StepKernels
from penstock.runtime.units import Units


class Shape(NamedTuple):
    """The size of a step, padding included."""

    sequences: int
    tokens: int
    decodes: int  # sequences of one token
    prompt_tokens: int  # of sequences with several tokens
    longest: int  # tokens of the longest of these
    logit_rows: int
    in_place: bool  # whether every token has a row of logits


class StepLimits(NamedTuple):
    """The largest numbers that a step can have."""

    sequences: int
    tokens: int
    drafts: int  # in one sequence
    logit_rows: int


@dataclass
class ChooseOptions:
    """How a step's rows of logits are sampled, as the device needs it."""

    filtered: bool  # whether any row's kind is FILTERED or TOP_K
    logprobs: int  # alternatives that are packed for every row; -1: none
    edited: Tensor | None = None  # int32: indices of the rows of logits that are edited before sampling

    def set_edited(self, sent: Sequence[Tensor]) -> None:
        (self.edited,) = sent

    @property
    def plain(self) -> bool:
        """Whether the step only samples: it edits no logits and packs no logprobs."""
        return self.edited is None and self.logprobs < 0


class ModelStep(Protocol):
    """Executes the stages of a step, eagerly or by a recording."""

    def wake(self) -> None:
        """Wake the kernel threads while the host plans. Not called for a repeated step: its planning is too short."""

    def forward(self, shape: Shape, attention: Sequence[Any]) -> Hidden:
        """As Decoder.forward. `attention` has what the host has planned for each KV group, and may be empty."""

    def finite(self, hidden: Hidden) -> Tensor:
        """Return bool [tokens]: which rows of `forward`'s last result have neither NaN nor infinity."""

    def logits(self, hidden: Hidden) -> Tensor | None:
        """As Decoder.logits. A recording may overwrite the hidden states that `forward` returned."""

    def score(self, logits: Tensor, targets: Tensor, k: int) -> Tensor:
        """Return int32 [n, words]: packed logprobs of int64 `targets` [n] with k alternatives each."""

    def choose(self, logits: Tensor, shape: Shape, options: ChooseOptions, masked: bool) -> StepOutputs:
        """Choose a token for each row of logits, and append the tokens to the rows of the batch. `masked`: some rows
        have grammar masks."""

    def decode(self, shape: Shape, attention: Sequence[Any], options: ChooseOptions, masked: bool) -> StepOutputs:
        """`forward`, `logits` and `choose` in one, for a step in which every token has a row of logits."""

    def advance(self, shape: Shape) -> None:
        """Append tokens to the rows on a rank that does not choose them: tokens that another rank broadcasts, or zeros,
        which `ModelRunner.learn` replaces later."""


class EagerStep:
    """Launches every kernel of a step from Python. A step is launched before the next one is described.

    With a mesh it executes one rank's part of the step, and all ranks execute the same steps.
    """

    def __init__(
        self,
        model: LanguageModel,
        kernels: StepKernels,
        state: BatchRows,
        caches: Sequence[LayerCache],
        windows: Sequence[Window],
        sampler: Sampler | None,
        limits: StepLimits,
        *,
        block_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        mesh: Mesh | None = None,
    ) -> None:
        """Allocates the arrays for steps within `limits`. `windows` has one for each KV group. `dtype` is the dtype of
        hidden states. `sampler` is None on ranks that do not sample."""
        self._model = model
        self._kernels = kernels
        self._state = state
        self._caches = caches
        self._windows = tuple(windows)
        self._sampler = sampler
        self._block_size = block_size
        device = state.token_ids.device
        sequences, tokens, logit_rows = limits.sequences, limits.tokens, limits.logit_rows
        self._mesh = mesh
        self.last = mesh is None or mesh.place.last  # the last pipeline stage, which has the head
        self._no_hidden = torch.zeros(0, hidden_size, dtype=dtype, device=device)
        first = mesh is None or mesh.place.first
        self.hidden = None if first else self.hidden_states(tokens)  # receives those of the stage before
        self.arrays = StepArrays.empty(sequences, logit_rows, tokens, len(windows), device)
        self.tokens = torch.zeros(logit_rows, dtype=torch.int64, device=device)  # sampled by another rank
        # `advance` counts output tokens. A rank without a sampler never reads these counts.
        self._outputs = torch.zeros(len(state.computed), dtype=torch.int32, device=device)
        self._spare = len(state.computed)  # the sampler's row for padding, after all others
        self.capacity = Shape(sequences, tokens, 0, tokens, tokens, logit_rows, False)

    @property
    def recordable(self) -> bool:
        """Whether all ops of the model are our kernels'."""
        return self._model.recordable

    def describe(self, units: Units, padding: int = 0) -> tuple[Shape, Change]:
        """Returns the step's shape, and the write that sends its description to the device. `padding` is the number of
        extra sequences that fill up a captured step. Raises RuntimeError if the step has more tokens than were
        allocated."""
        if units.tokens > self.capacity.tokens:
            raise RuntimeError(f"a plan has {units.tokens} tokens; a step has at most {self.capacity.tokens}")
        if not self.last:  # nothing is sampled at other stages
            units = units._replace(logits=np.zeros_like(units.logits))
        first = np.where(units.logits > 0, units.first_logit_rows, -1)
        described, decodes = order_units(
            units.length,
            units.offset[:-1],
            np.zeros_like(units.rows),
            units.rows,
            first,
            units.drafts,
            decodes_first=self._kernels.decodes_first,
        )
        if padding:
            described = pad_units(described, padding)
        unit, ahead = units.logit_rows
        count = len(unit) + (padding if self.last else 0)
        rows = np.zeros((LOGIT_LINES, count), np.int32)
        rows[ROW] = self._spare
        rows[ROW, : len(unit)] = units.rows[unit]
        rows[TOKEN, : len(unit)] = units.offset[1:][unit] - units.logits[unit] + ahead
        rows[AHEAD, : len(unit)] = ahead
        several = units.length[units.length > 1]
        shape = Shape(
            described.shape[1],
            units.tokens + padding,
            decodes + padding,
            int(several.sum()),
            int(several.max(initial=0)),
            count,
            units.in_place,
        )
        return shape, Change((described, rows), self._write)

    def _write(self, sent: Sequence[Tensor]) -> None:
        units, rows = sent
        self.arrays.units[:, : units.shape[1]] = units
        self.arrays.logit_rows[:, : rows.shape[1]] = rows

    def hidden_states(self, count: int) -> Tensor:
        """Returns zeroed memory for hidden states [count, hidden]."""
        return self._no_hidden.new_zeros(count, self._no_hidden.shape[1])

    def receive(self, shape: Shape) -> None:
        """Receive hidden states from the stage before, if there is one. Never captured."""
        if self._mesh is not None and self.hidden is not None:
            self._mesh.receive(self.hidden[: shape.tokens])

    def send(self, states: Tensor) -> None:
        """Send hidden states to the next stage, if there is one. Never captured."""
        if self._mesh is not None and not self.last:
            self._mesh.send(states)

    # -- the ModelStep protocol ------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Does nothing: there are no threads to wake."""

    def forward(self, shape: Shape, attention: Sequence[Any] = ()) -> Hidden:
        arrays, state, tokens = self.arrays, self._state, shape.tokens
        self._kernels.fill(state, arrays, shape.sequences, self._block_size)
        seen = attention or [
            StepSequences(
                window,
                arrays.units,
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
        groups.append(GroupInput(arrays.units[:, : shape.sequences].T, offsets, offsets))  # for layers with a state
        hidden = None if self.hidden is None else self.hidden[:tokens]
        inputs = StepInput(arrays.token_ids[:tokens], arrays.positions[:tokens], tuple(groups), hidden)
        return self._model.forward(inputs, self._caches)

    def finite(self, hidden: Hidden) -> Tensor:
        return hidden.latest.sum(-1, dtype=torch.float32).isfinite()

    def logits(self, hidden: Hidden) -> Tensor | None:
        return self._model.logits(hidden)

    def vectors(self, hidden: Hidden) -> Tensor:
        """As Decoder.vectors."""
        return self._model.vectors(hidden)

    def score(self, logits: Tensor, targets: Tensor, k: int) -> Tensor:
        assert self._sampler is not None, "prompts are scored on the rank that samples"
        return self._kernels.score(logits, targets, k, self._sampler.rows, self._sampler.edits)

    def choose(self, logits: Tensor, shape: Shape, options: ChooseOptions, masked: bool) -> StepOutputs:
        assert self._sampler is not None, "tokens are chosen on the rank that samples"
        chosen = self._kernels.choose(
            logits,
            self.arrays.logit_rows[:, : len(logits)],
            self._sampler.rows,
            self._sampler.edits,
            self._state.token_ids,
            edited=options.edited,
            filtered=options.filtered,
            logprobs=options.logprobs,
            masks=self._sampler.masks if masked else None,
        )
        self._advance(shape, chosen.tokens, self._sampler.rows.outputs)
        return StepOutputs(*chosen)

    def decode(self, shape: Shape, attention: Sequence[Any], options: ChooseOptions, masked: bool) -> StepOutputs:
        logits = self.logits(self.forward(shape, attention))
        assert logits is not None, "the rank that samples has logits"
        return self.choose(logits, shape, options, masked)

    def advance(self, shape: Shape) -> None:
        self._advance(shape, self.tokens[: max(shape.logit_rows, 1)], self._outputs)

    def _advance(self, shape: Shape, tokens: Tensor, outputs: Tensor) -> None:
        if shape.logit_rows and self._mesh is not None and self._mesh.broadcasts_tokens:
            self._mesh.broadcast(tokens)
        self._kernels.advance(self._state, self.arrays, shape.sequences, tokens, outputs)
