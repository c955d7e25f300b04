"""Sampling: the next token of every row of logits, and its logprobs."""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import SampleEdits, SampleOp
from penstock.messages import row_size

CHOSEN, NOT_FINITE, ALL_BANNED = range(3)


class RowParameters(Protocol):
    """What each row asks for: contiguous arrays indexed by row, of which no other may take the place."""

    kind: NDArray[np.int8]  # GREEDY, PLAIN, FILTERED, TOP_K (see runtime/sampling_batch.py)
    temperature: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    streams: NDArray[np.uint64]
    num_outputs: NDArray[np.int64]
    logprobs: NDArray[np.int64]


class Chosen(NamedTuple):
    """By place among the rows sampled. Views of memory that the next call writes to."""

    tokens: NDArray[np.int64]  # 0 where the status is not CHOSEN
    status: NDArray[np.int32]
    packed: NDArray[np.int32]  # [count, words]: logprobs as messages/logprobs.py packs them


class NativeSampling:
    """Chooses tokens on a session's threads, one row to a thread."""

    def __init__(self, session: Session, parameters: RowParameters, vocab_size: int) -> None:
        rows = len(parameters.kind)
        self._session = session
        self._parameters = parameters  # the op points to their arrays
        self._vocab_size = vocab_size
        self._count = ctypes.c_int64()
        self.rows = np.empty(rows, np.int64)
        self.tokens = np.empty(rows, np.int64)
        self.status = np.empty(rows, np.int32)
        self._packed = np.empty((rows, row_size(0) // 4), np.int32)
        self.op = SampleOp(
            count=ctypes.addressof(self._count),
            rows=self.rows.ctypes.data,
            vocab=vocab_size,
            choosing=parameters.kind.ctypes.data,
            temperature=parameters.temperature.ctypes.data,
            top_k=parameters.top_k.ctypes.data,
            top_p=parameters.top_p.ctypes.data,
            min_p=parameters.min_p.ctypes.data,
            streams=parameters.streams.ctypes.data,
            num_outputs=parameters.num_outputs.ctypes.data,
            logprobs=parameters.logprobs.ctypes.data,
            tokens=self.tokens.ctypes.data,
            status=self.status.ctypes.data,
        )

    def __call__(
        self, logits: Tensor, rows: NDArray[np.int64], edits: Mapping[int, SampleEdits], logprobs: int
    ) -> Chosen:
        """One token for each of `rows`. `logits` float32 [rows, vocab], contiguous, written to and restored.

        `edits` by place among the rows. `logprobs`: the most that any row asks for, at most the vocabulary.
        """
        count = len(rows)
        if logits.shape != (count, self._vocab_size) or not logits.is_contiguous():
            raise ValueError(f"logits {tuple(logits.shape)} of {count} rows and a vocabulary of {self._vocab_size}")
        self._count.value = count
        self.rows[:count] = rows
        words = row_size(max(logprobs, 0)) // 4
        if self._packed.shape[1] < words:
            self._packed = np.empty((len(self.rows), words), np.int32)
        op = self.op
        op.logits = logits.data_ptr()
        op.packed, op.packed_stride = self._packed.ctypes.data, self._packed.shape[1]
        of_rows = (SampleEdits * count)() if edits else None
        for place, of_row in edits.items():
            of_rows[place] = of_row
        op.edits = ctypes.addressof(of_rows) if edits else None
        self._session.run(op)
        return self.chosen()

    def take(self, rows: NDArray[np.int64]) -> None:
        """Have the op, where it is run in a program from now on, sample these. None wants logprobs or has edits."""
        self._count.value = len(rows)
        self.rows[: len(rows)] = rows
        self.op.edits = None

    def chosen(self) -> Chosen:
        """What the op's last run gave."""
        count = self._count.value
        return Chosen(self.tokens[:count], self.status[:count], self._packed[:count])
