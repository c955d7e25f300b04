"""A decode step in one native call.

Between two programs a processor's caches are full of weights: every line of Python, and all it touches, comes from
memory. So where every sequence samples after one token, the step's inputs, its sampling and the batch's bookkeeping are
native as well; where it is the step before again, each sequence a token further, nothing is left to Python but the
call. Any other step goes the long way (see runner.py) and ends with the same batch.
"""

import time
from ctypes import addressof

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import AttentionBatch
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import AcceptOp, NextGroup, NextOp
from penstock.messages import Work
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.inputs import StepInputs
from penstock.runtime.native_chooser import NativeChooser
from penstock.runtime.recorded import RecordedDecoder
from penstock.runtime.sampling_batch import Sampled


class Decoding:
    """Makes steps in which every sequence samples after one token, and nobody's logits are edited."""

    def __init__(
        self,
        model: RecordedDecoder,
        session: Session,
        batch: PersistentBatch,
        inputs: StepInputs,
        chooser: NativeChooser,
    ) -> None:
        self._model, self._batch, self._chooser = model, batch, chooser
        sampling = chooser.sampling
        self.left = 0  # steps that may follow before the long way is due
        self.work: tuple[Work, ...] = ()  # which these repeat
        self.rows = np.zeros(0, np.int64)  # of the batch: of each
        self._offsets = np.arange(len(sampling.rows) + 1)
        self.seconds = 0.0  # that the last of them took
        failed = np.zeros(1, np.int64)
        # Views that Python itself reads: NumPy's code is as little in a cache as everything else.
        self._failed = memoryview(failed)
        self._all_tokens = memoryview(sampling.tokens)
        self._tokens = self._all_tokens  # of as many rows as the steps have
        self._logprobs = False  # any are wanted
        rows, batch_rows = addressof(model.tokens), sampling.rows.ctypes.data
        tokens, stride = batch.token_ids.ctypes.data, batch.token_ids.shape[1]
        computed = batch.num_computed.ctypes.data
        token_ids, positions, *slots = (tensor.data_ptr() for tensor in inputs.tensors)
        groups = (NextGroup * len(model.rooms))(
            *(
                NextGroup(
                    table.ctypes.data,
                    table.shape[1],
                    room.tables.ctypes.data,
                    room.tables.shape[1],
                    room.context_lens.ctypes.data,
                    *slots[2 * group : 2 * group + 2],
                )
                for group, (table, room) in enumerate(zip(batch.tables, model.rooms, strict=True))
            )
        )
        with session.record() as self._program:
            sizes = (addressof(groups), len(groups), batch.block_size)
            session.run(NextOp(rows, batch_rows, tokens, stride, computed, token_ids, positions, *sizes), groups)
            for program in model.programs:
                self._program.extend(program)
            self._sample = len(self._program)
            session.run(sampling.op)
            counts = (batch.num_tokens.ctypes.data, computed, sampling.op.num_outputs)
            chosen = (sampling.tokens.ctypes.data, sampling.status.ctypes.data)
            where = (tokens, stride, *counts, failed.ctypes.data)
            session.run(AcceptOp(rows, batch_rows, *chosen, *where), batch, inputs, chooser, failed)

    def follow(self, work: tuple[Work, ...], rows: NDArray[np.int64]) -> None:
        """A step has been made the long way. `work`: what it did, of these rows of the batch, where every sequence
        sampled after one token."""
        self.work, self.rows, self.left = work, rows, 0
        if work and not self._chooser.edits:
            self._go_on(self._chooser.logprobs)

    def begin(self, work: tuple[Work, ...]) -> bool:
        """Make ready for a step that does not repeat the last, but whose sequences all sample after one token. False
        where it has to be made the long way: another kind of step, or one that asks for more than tokens."""
        op = self._chooser.sampling.op
        if not (work and op.logits) or any(unit.count != 1 or not unit.sample for unit in work):
            return False
        batch, count = self._batch, len(work)
        rows = np.array([batch.row(unit.seq) for unit in work], np.int64)
        context = batch.num_computed[rows] + 1
        if batch.errors or (batch.num_tokens[rows] != context).any() or not self._chooser.take(rows):
            return False
        self._model.resize(count)
        blocks = -(-int(context.max()) // batch.block_size)
        for table, room in zip(batch.tables, self._model.rooms, strict=True):
            offsets = self._offsets[: count + 1]
            room.fill(AttentionBatch(batch.block_size, room.window, offsets, context, table[rows, :blocks]))
        self.work, self.rows = work, rows
        self._go_on(logprobs=False)
        self.left += 1  # itself
        return True

    def _go_on(self, logprobs: bool) -> None:
        """From the rooms and the sampler as they are now."""
        self.left = min(room.steps_unchanged() for room in self._model.rooms)
        self._program.replace(self._sample, self._chooser.sampling.op)
        self._tokens = self._all_tokens[: len(self.work)]
        self._logprobs = logprobs

    def run(self) -> tuple[int, ...] | None:
        """Those sequences' next tokens, which the batch has taken. None where there is more to `read`."""
        self.left -= 1
        began = time.perf_counter()
        self._model.run(self._program)
        self.seconds = time.perf_counter() - began
        return None if self._logprobs or self._failed[0] else tuple(self._tokens.tolist())

    def read(self) -> Sampled:
        """All that the last step gave."""
        return self._chooser.read()
