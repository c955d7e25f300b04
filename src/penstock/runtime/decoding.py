"""A decode step in one native call.

Between two programs a processor's caches are full of weights: every line of Python, and all it touches, comes from
memory. So where a step is the one before again, each sequence a token further, its inputs, its sampling and the batch's
bookkeeping are native as well. Any other step goes the long way (see runner.py) and ends with the same batch.
"""

from ctypes import addressof, c_int64

from penstock.kernels.native.library import AcceptOp, NextGroup, NextOp
from penstock.kernels.native.session import Session
from penstock.runtime.batch import PersistentBatch
from penstock.runtime.inputs import StepInputs
from penstock.runtime.native_chooser import NativeChooser
from penstock.runtime.recorded import RecordedDecoder
from penstock.runtime.sampling_batch import Sampled


class Decoding:
    """Repeats a step in which every sequence sampled after one token, and none of whose logits were edited."""

    def __init__(
        self,
        model: RecordedDecoder,
        session: Session,
        batch: PersistentBatch,
        inputs: StepInputs,
        chooser: NativeChooser,
    ) -> None:
        self._model, self._chooser = model, chooser
        sampling = chooser.sampling
        self._left = 0  # steps that may follow before the long way is due
        self._failed = c_int64()
        self._tokens = sampling.tokens  # of as many rows as the steps have
        self._no_logprobs: list[bytes] = []
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
            failed = addressof(self._failed)
            session.run(AcceptOp(rows, batch_rows, *chosen, tokens, stride, *counts, failed), batch, inputs, chooser)

    def follow(self, decodes: bool) -> None:
        """A step has been made the long way. `decodes`: every sequence sampled after one token."""
        self._left = 0
        if decodes and not self._chooser.edits:
            self._left = min(room.lasting() for room in self._model.rooms)
            self._program.replace(self._sample, self._chooser.sampling.op)
            self._tokens = self._chooser.sampling.chosen().tokens
            self._no_logprobs = [b""] * len(self._tokens)

    @property
    def possible(self) -> bool:
        """Whether the last step can be followed by one of the same sequences this way."""
        return self._left > 0

    def run(self) -> Sampled:
        """Those sequences' next tokens. The batch has taken them."""
        self._left -= 1
        self._model.run(self._program)
        if self._failed.value or self._chooser.logprobs:
            return self._chooser.read()
        return Sampled(self._tokens.tolist(), self._no_logprobs, {})
