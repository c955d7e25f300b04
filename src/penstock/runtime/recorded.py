"""A model whose steps are recorded once and run again: the CPU's answer to a CUDA graph.

A forward pass is some two hundred kernel calls, each of several microseconds of Python. Here the decoder's Python runs
once, with the kernels recording; a step then fills in its inputs and runs the recorded program in one native call. The
decoder stays the one description of the model, and gives the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.families import ModelSpec
from penstock.kernels import AttentionBatch
from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.linear import DTYPES
from penstock.kernels.native.session import Program, Session, TimedOp
from penstock.kernels.native.structs import FiniteOp
from penstock.models import Decoder, Hidden, LayerCache, StepInput
from penstock.runtime.inputs import StepInputs


class RecordedDecoder:
    """Stands in for a Decoder. One step at a time: what it returns is overwritten by the next call."""

    def __init__(
        self,
        model: Decoder,
        session: Session,
        spec: ModelSpec,
        caches: Sequence[LayerCache],
        inputs: StepInputs,
        *,
        sequences: int,
        blocks: int,
        logit_rows: int,
    ) -> None:
        """For steps that `inputs` was filled with, of at most so many sequences of at most `blocks` blocks each."""
        self.tokens, self._logit_rows = c_int64(), c_int64()  # as the last step had
        self._profiled: list[tuple[Program, list[float]]] | None = None  # where ops are to be timed
        tokens = len(inputs.tensors[0])
        self.rooms = tuple(AttentionWork(sequences, tokens, blocks, window) for window in spec.windows)
        with session.record() as self._forward:
            for tensor in inputs.tensors:
                self._forward.input(tensor, self.tokens)
            self._token_ids = inputs.tensors[0]
            if inputs.hidden is not None:
                self._forward.input(inputs.hidden, self.tokens)
            self._hidden = model.forward(inputs.step(inputs.tensors, self.rooms), caches)
        self._finite = np.zeros(tokens, np.bool_)
        with session.record() as self._check:
            latest = self._hidden.latest
            where = (latest.data_ptr(), self._finite.ctypes.data, latest.shape[1], DTYPES[latest.dtype])
            session.run(FiniteOp(addressof(self.tokens), *where))
        self._logits: Tensor | None = None
        if not spec.has_head:
            return
        with session.record() as self._head:
            # Where all rows of a step are sampled, they are in place.
            rows = self._hidden.mapped(lambda tensor: self._head.input(tensor[:logit_rows], self._logit_rows))
            self._logits = model.logits(rows)

    def prepare(self, group: int, batch: AttentionBatch) -> AttentionWork:
        """In the place of the attention's own `prepare`."""
        self.rooms[group].fill(batch)
        return self.rooms[group]

    def forward(self, step: StepInput, caches: Sequence[LayerCache]) -> Hidden:
        """`step` is what its inputs were filled with last, and `caches` are those it was recorded with."""
        if step.token_ids.data_ptr() != self._token_ids.data_ptr():
            raise ValueError("a recorded step computes what its own inputs hold")
        count = self.tokens.value = len(step.token_ids)
        self.run(self._forward)
        return self._hidden[:count]

    def resize(self, count: int) -> None:
        """Have a program that holds ours compute, and give logits of, so many rows."""
        self.tokens.value = self._logit_rows.value = count

    def finite(self) -> NDArray[np.bool_]:
        """Of the rows that `forward` gave, those that hold neither NaN nor infinity."""
        self.run(self._check)
        return self._finite[: self.tokens.value]

    def logits(self, hidden: Hidden) -> Tensor | None:
        """Of at most `logit_rows` rows. They take the place of the first of those that `forward` gave."""
        count = self._logit_rows.value = len(hidden)
        for place, given in ((self._hidden.states, hidden.states), (self._hidden.latest, hidden.latest)):
            if given.data_ptr() != place.data_ptr():
                place[:count] = given
        self.run(self._head)
        return None if self._logits is None else self._logits[:count]

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

    @property
    def programs(self) -> tuple[Program, Program]:
        """From a step's inputs to what `forward` gives, and from its first rows to logits."""
        return self._forward, self._head

    def run(self, program: Program) -> None:
        """One of them, or one that holds them."""
        if self._profiled is None:
            program.run()
        else:
            self._profiled.append((program, program.profile()))
