"""Choosing tokens by the native kernels: the same tokens as in NumPy (see kernels/native/sampling.h)."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.native.sampling import CHOSEN, NativeSampling
from penstock.kernels.native.sampling import NOT_FINITE as STATUS_NOT_FINITE
from penstock.kernels.native.session import Session
from penstock.messages import row_size
from penstock.runtime.sampling_batch import ALL_BANNED, NOT_FINITE, Sampled, SamplingBatch


class NativeChooser:
    """Chooses the next token of rows of a batch."""

    def __init__(self, batch: SamplingBatch, session: Session) -> None:
        self._batch = batch
        self._wanted: list[int] = []  # logprobs, by place among the rows of the last call
        self._edited = False  # whether any of these was edited: its op points to edits that may be gone by now
        self.sampling = NativeSampling(session, batch, batch.vocab_size)

    def __call__(self, logits: Tensor, rows: NDArray[np.int64]) -> Sampled:
        """`logits`: float32 [rows, vocab], overwritten."""
        batch = self._batch
        logits = logits.contiguous()
        wanted = batch.logprobs[rows]
        most = int(wanted.max(initial=-1))
        if most > batch.vocab_size:
            raise ValueError(
                f"{most} logprobs of a vocabulary of {batch.vocab_size}: ask for {batch.vocab_size} at most"
            )
        self._wanted = wanted.tolist() if most >= 0 else []
        edits = {}
        if batch.edits:
            edits = {i: batch.edits[row].struct for i, row in enumerate(rows.tolist()) if row in batch.edits}
        self._edited = bool(edits)
        self.sampling(logits, rows, edits, most)
        return self.read()

    def take(self, rows: NDArray[np.int64]) -> bool:
        """Have the sampling op choose for these rows when it is run in a program; False where a row wants more."""
        if self.edits or (self._batch.logprobs[rows] >= 0).any():
            return False
        self._wanted = []
        self.sampling.take(rows)
        return True

    @property
    def edits(self) -> bool:
        """Whether there are rows whose logits are edited, or were in the last call: those are handed over anew for
        every call."""
        return self._edited or bool(self._batch.edits)

    @property
    def logprobs(self) -> bool:
        """Whether rows of the last call asked for any."""
        return bool(self._wanted)

    def read(self) -> Sampled:
        """What the sampling op chose in its last run: here, or in a program, for the rows of the last call."""
        chosen = self.sampling.chosen()
        errors = {}
        if chosen.status.any():
            errors = {
                int(i): NOT_FINITE if chosen.status[i] == STATUS_NOT_FINITE else ALL_BANNED
                for i in np.flatnonzero(chosen.status != CHOSEN)
            }
        logprobs = [b""] * len(chosen.tokens)
        for i, k in enumerate(self._wanted):
            if k >= 0 and i not in errors:
                logprobs[i] = chosen.packed[i, : row_size(k) // 4].tobytes()
        return Sampled(chosen.tokens.tolist(), logprobs, errors)
