"""A step that is recorded once and replayed: the CPU's answer to a CUDA graph.

A forward pass is some two hundred kernel calls, each of several microseconds of Python. Here the Python of an eager
step runs once, with the native kernels recording; a step then sets how many rows there are and runs the recordings,
each with one native call. The eager step stays the one description, and gives the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_int64
from typing import Any

import msgspec
import torch
from torch import Tensor

from penstock.kernels.native.attention import AttentionWork
from penstock.kernels.native.linear import DTYPES
from penstock.kernels.native.session import Program, Session, TimedOp
from penstock.kernels.native.structs import FiniteOp
from penstock.models import Hidden
from penstock.runtime.device import StepOutputs
from penstock.runtime.native_step import NativeStep
from penstock.runtime.sampling.sampler import Sampler
from penstock.runtime.step import ChooseOptions, EagerStep, Shape


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
        self._session, self._kernels, self._sampler = session, kernels, sampler
        self._token_ids = token_ids
        self._tokens, self._rows = c_int64(), c_int64()  # how many the step has: tokens, and rows for the head
        self._profiled: list[tuple[Program, list[float]]] | None = None  # where ops are to be timed
        capacity, arrays = step.capacity, step.arrays
        self._most_rows = capacity.logit_rows
        with session.record() as self._forward:
            for tensor in (arrays.token_ids, arrays.positions, arrays.blocks, arrays.offsets, step.hidden):
                if tensor is not None:
                    self._forward.input(tensor, self._tokens)
            self._forward.input(arrays.units, kernels.sequences)
            self._hidden = step.forward(capacity, attention)
        self._finite = torch.zeros(capacity.tokens, dtype=torch.bool)
        with session.record() as self._check:
            latest = self._hidden.latest
            where = (latest.data_ptr(), self._finite.data_ptr(), latest.shape[1], DTYPES[latest.dtype])
            session.run(FiniteOp(addressof(self._tokens), *where), latest)
        self._logits: Tensor | None = None
        if step.last:
            with session.record() as self._head:
                # If every token has a row of logits, the rows are in place.
                most = max(capacity.logit_rows, scored)
                rows = self._hidden.mapped(lambda tensor: self._head.input(tensor[:most], self._rows))
                self._logits = step.logits(rows)
        self._given = StepOutputs()
        with session.record() as self._advance:
            if sampler is None or self._logits is None:
                step.advance(capacity)
            else:
                self._given = step.choose(self._logits[: capacity.logit_rows], capacity, ChooseOptions(True, -1), False)
        with session.record() as self._decode:
            if self._given.tokens is not None:
                for program in (self._forward, self._head, self._advance):
                    self._decode.extend(program)
        # Views of as many rows as the last step had: a repeated step calls neither torch nor NumPy.
        self._shape: Shape | None = None
        self._options: ChooseOptions | None = None  # of the last choice, as `_masked`
        self._masked = False
        self._tokens.value = -1
        self._part, self._given_part = self._hidden, self._given
        self._step = step

    def wake(self) -> None:
        """Wake sleeping threads, which takes longer than planning a step."""
        self._session.wake()

    def forward(self, shape: Shape, attention: Sequence[Any]) -> Hidden:
        self._kernels.sequences.value = shape.sequences
        self._set_tokens(shape.tokens)
        self._shape = None
        self._run(self._forward)
        return self._part

    def finite(self, hidden: Hidden) -> Tensor:
        self._run(self._check)
        return self._finite[: self._tokens.value]

    def logits(self, hidden: Hidden) -> Tensor | None:
        """Overwrites the first rows of `forward`'s result with `hidden`, unless it is that result."""
        if hidden is not self._part:
            self._bring_to_front(hidden)
        count = len(hidden)
        self._rows.value = count
        self._run(self._head)
        return None if self._logits is None else self._logits[:count]

    def score(self, logits: Tensor, targets: Tensor, k: int) -> Tensor:
        self._shape = None
        return self._step.score(logits, targets, k)

    def choose(self, logits: Tensor, shape: Shape, options: ChooseOptions, masked: bool) -> StepOutputs:
        self._prepare_choice(shape, options, masked)
        self._run(self._advance)
        return self._chosen(options)

    def decode(self, shape: Shape, attention: Sequence[Any], options: ChooseOptions, masked: bool) -> StepOutputs:
        """Executes the step with one native call.

        A repeated step skips all work that it does not need: weights have evicted Python's code from the caches, so
        each line costs cache misses.
        """
        if shape is not self._shape:
            self._kernels.sequences.value, self._rows.value = shape.sequences, shape.tokens
            self._set_tokens(shape.tokens)
        self._prepare_choice(shape, options, masked)
        self._run(self._decode)
        return self._chosen(options)

    def advance(self, shape: Shape) -> None:
        self._kernels.logit_rows.value, self._shape = 0, None
        self._run(self._advance)

    def _set_tokens(self, count: int) -> None:
        if count != self._tokens.value:
            self._tokens.value, self._part = count, self._hidden[:count]

    def _prepare_choice(self, shape: Shape, options: ChooseOptions, masked: bool) -> None:
        """Say what the sampling op reads. A row that gets edits, which may move them, brings other options."""
        if shape is self._shape and options is self._options and masked == self._masked:
            return
        assert self._sampler is not None, "tokens are chosen on the rank that samples"
        self._options, self._masked = options, masked
        count = shape.logit_rows
        if shape is not self._shape:
            self._shape, self._kernels.logit_rows.value = shape, count
            self._given_part = self._given.mapped(lambda tensor: memoryview(tensor[:count].numpy()))
        masks = self._sampler.masks if masked else None
        self._kernels.describe(self._sampler.edits, self._token_ids, self._most_rows, options.logprobs, masks)

    def _chosen(self, options: ChooseOptions) -> StepOutputs:
        if options.logprobs < 0:
            return self._given_part
        packed = self._kernels.packed(self._kernels.logit_rows.value)
        return msgspec.structs.replace(self._given_part, packed=packed)

    def _bring_to_front(self, hidden: Hidden) -> None:
        """Put rows where the head reads them."""
        ours, theirs = self._hidden, hidden
        pairs = (ours.states, theirs.states), (ours.attended, theirs.attended), (ours.own, theirs.own)
        for place, given in pairs:
            if place is not None and given is not None:
                place[: len(given)] = given

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
