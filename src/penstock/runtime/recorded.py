"""A model whose steps are recorded once and run again: the CPU's answer to a CUDA graph.

A forward pass is some two hundred kernel calls, each of several microseconds of Python. Here the decoder's Python runs
once, with the kernels recording; a step then fills in its inputs and runs the recorded program in one native call. The
decoder stays the one description of the model, and gives the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64

import torch
from torch import Tensor

from penstock.families import ModelSpec
from penstock.kernels import AttentionBatch
from penstock.kernels.native.attention import Prepared
from penstock.kernels.native.session import Program, Session, TimedOp
from penstock.models import Decoder, GroupInput, LayerCache, StepInput


class RecordedDecoder:
    """Stands in for a Decoder. One step at a time: what it returns is overwritten by the next call."""

    def __init__(
        self,
        model: Decoder,
        session: Session,
        spec: ModelSpec,
        caches: Sequence[LayerCache],
        *,
        tokens: int,
        sequences: int,
        blocks: int,
        logit_rows: int,
    ) -> None:
        """With room for steps of so many tokens and sequences, of at most `blocks` blocks each."""
        self._tokens, self._logit_rows = c_int64(), c_int64()
        self._profiled: list[tuple[Program, list[float]]] | None = None  # where ops are to be timed
        self.rooms = tuple(Prepared(sequences, tokens, blocks, window) for window in spec.windows)
        with session.record() as self._forward:
            self._step = StepInput(
                self._integers(tokens),
                self._integers(tokens),
                tuple(GroupInput(room, self._integers(tokens), self._integers(tokens)) for room in self.rooms),
            )
            self._hidden = model.forward(self._step, caches)
        with session.record() as self._head:
            rows = torch.empty(logit_rows, spec.hidden_size, dtype=self._hidden.dtype)
            self._rows = self._head.input(rows, self._logit_rows)
            self._logits = model.logits(rows)

    def prepare(self, group: int, batch: AttentionBatch) -> Prepared:
        """In the place of the attention's own `prepare`."""
        self.rooms[group].fill(batch)
        return self.rooms[group]

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Tensor:
        """`caches` are those it was recorded with."""
        count = len(step.token_ids)
        self._step.token_ids[:count] = step.token_ids
        self._step.positions[:count] = step.positions
        for ours, theirs in zip(self._step.groups, step.groups, strict=True):
            assert ours.attention is theirs.attention
            ours.blocks[:count] = theirs.blocks
            ours.offsets[:count] = theirs.offsets
        self._tokens.value = count
        self._run(self._forward)
        return self._hidden[:count]

    def logits(self, hidden: Tensor) -> Tensor:
        count = len(hidden)
        self._rows[:count] = hidden
        self._logit_rows.value = count
        self._run(self._head)
        return self._logits[:count]

    @contextmanager
    def profile(self) -> Iterator[list[TimedOp]]:
        """Gets the ops that run within, timed, at its end: so little as possible is done between them."""
        self._profiled = profiled = []
        timed: list[TimedOp] = []
        try:
            yield timed
        finally:
            self._profiled = None
        for program, seconds in profiled:
            timed += program.timed(seconds)

    def _run(self, program: Program) -> None:
        if self._profiled is None:
            program.run()
        else:
            self._profiled.append((program, program.profile()))

    def _integers(self, count: int) -> Tensor:
        return self._forward.input(torch.zeros(count, dtype=torch.int64), self._tokens)
