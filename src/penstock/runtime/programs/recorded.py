"""A step that is recorded once and replayed: the CPU's answer to a CUDA graph.

A forward pass is some two hundred kernel calls, each of several microseconds of Python. Here the Python of an eager
step runs once, with the native kernels recording; a step then sets how many rows there are and runs the recordings,
each with one native call. The eager step stays the one description, and gives the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.batch_arrays import Chosen, EditRows
from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.linear import DTYPES
from penstock.kernels.native.session import Program, Session, TimedOp
from penstock.kernels.native.structs import FiniteOp
from penstock.models import Hidden
from penstock.runtime.native_step import NativeStep
from penstock.runtime.sampling.sampler import Sampler
from penstock.runtime.step import EagerStep, RowsToChoose, Shape


class RecordedStep:
    """Stands in for an EagerStep. One step at a time: what it returns is overwritten by the next call."""

    def __init__(
        self,
        step: EagerStep,
        kernels: NativeStep,
        session: Session,
        attention: Sequence[AttentionWork],
        token_ids: Tensor,
        sampler: Sampler | None,
        *,
        scored: int,
    ) -> None:
        """Records `step`, which uses `kernels`. Both read `attention` and the batch's `token_ids`. At most `scored`
        rows of a prompt get logits at once."""
        self._session, self._kernels, self._attention, self._sampler = session, kernels, attention, sampler
        self._token_ids = token_ids
        self._tokens, self._rows = c_int64(), c_int64()  # how many the step has: tokens, and rows for the head
        self._profiled: list[tuple[Program, list[float]]] | None = None  # where ops are to be timed
        capacity, arrays = step.capacity, step.arrays
        with session.record() as self._forward:
            for tensor in (arrays.token_ids, arrays.positions, arrays.blocks, arrays.offsets, step.hidden):
                if tensor is not None:
                    self._forward.input(tensor, self._tokens)
            self._hidden = step.forward(capacity, attention)
        self._finite = torch.zeros(capacity.tokens, dtype=torch.bool)
        with session.record() as self._check:
            latest = self._hidden.latest
            where = (latest.data_ptr(), self._finite.data_ptr(), latest.shape[1], DTYPES[latest.dtype])
            session.run(FiniteOp(addressof(self._tokens), *where), latest)
        self._logits: Tensor | None = None
        if step.last:
            with session.record() as self._head:
                # Where every token has a row of logits, the rows are in place.
                most = max(capacity.logit_rows, scored)
                rows = self._hidden.mapped(lambda tensor: self._head.input(tensor[:most], self._rows))
                self._logits = step.logits(rows)
        self._chosen: Chosen | None = None
        with session.record() as self._advance:
            if sampler is not None and self._logits is not None:
                logits = self._logits[: capacity.logit_rows]
                self._chosen = step.choose(logits, RowsToChoose(True, -1))
            step.advance(capacity, None if self._chosen is None else self._chosen.tokens)
        self._described: tuple[EditRows | None, int] = (None, -1)  # edits and logprobs that the sampling op reads
        self._step = step

    def wake(self) -> None:
        """Have threads that sleep wait awake: waking takes them longer than planning a step."""
        self._session.wake()

    def forward(self, shape: Shape, attention: Sequence[Any]) -> Hidden:
        self._kernels.sequences.value, self._tokens.value = shape.sequences, shape.tokens
        self._run(self._forward)
        return self._hidden[: shape.tokens]

    def finite(self, hidden: Hidden) -> Tensor:
        self._run(self._check)
        return self._finite[: self._tokens.value]

    def logits(self, hidden: Hidden) -> Tensor | None:
        """The rows of `hidden` take the place of the first of those that `forward` gave."""
        count = self._rows.value = len(hidden)
        for place, given in ((self._hidden.states, hidden.states), (self._hidden.attended, hidden.attended)):
            if place is not None and given is not None and given.data_ptr() != place.data_ptr():
                place[:count] = given
        self._run(self._head)
        return None if self._logits is None else self._logits[:count]

    def score(self, logits: Tensor, targets: Tensor, k: int) -> Tensor:
        self._described = (None, -1)
        return self._step.score(logits, targets, k)

    def choose(self, logits: Tensor, asked: RowsToChoose) -> Chosen:
        """The batch is advanced at once: `advance` has nothing left to do."""
        assert self._chosen is not None and self._sampler is not None, "tokens are chosen on the rank that samples"
        count = self._kernels.logit_rows.value = len(logits)
        edits = self._sampler.edits
        if self._described[0] is not edits or self._described[1] != asked.logprobs:
            self._kernels.describe(edits, self._token_ids, len(self._chosen.tokens), asked.logprobs)
            self._described = (edits, asked.logprobs)
        self._run(self._advance)
        packed = self._kernels.packed(count) if asked.logprobs >= 0 else None
        return Chosen(self._chosen.tokens[:count], self._chosen.status[:count], packed)

    def advance(self, shape: Shape, tokens: Tensor | None) -> None:
        if tokens is None:
            self._kernels.logit_rows.value = 0
            self._run(self._advance)

    @contextmanager
    def profile(self) -> Iterator[list[TimedOp]]:
        """Times the ops that run within. The list is filled at the end: as little as possible is done between ops."""
        profiled: list[tuple[Program, list[float]]] = []
        self._profiled = profiled
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
