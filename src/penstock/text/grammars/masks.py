"""Computes the masks of a step on several threads."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.text.grammars.copies import GrammarCopy
from penstock.text.grammars.guarded import GuardedCopy


class MaskJob(NamedTuple):
    """The masks of one sequence: for its next token, and for those after each draft."""

    grammar: GrammarCopy | GuardedCopy
    line: int  # of the first one among the step's masks
    drafts: list[int]


class MaskThreads:
    """The caller's thread and up to `threads` - 1 others. llguidance itself can use several threads, too, but does not
    say how long each mask took."""

    def __init__(self, threads: int) -> None:
        self._others = threads - 1
        self._pool = ThreadPoolExecutor(max(self._others, 1), "masks")

    def fill(self, jobs: Sequence[MaskJob], words: NDArray[np.int32]) -> None:
        """Fills in masks in the lines of `words` [lines, vocab / 32]."""
        for job in jobs:
            if isinstance(job.grammar, GuardedCopy):  # these have lanes of their own
                job.grammar.start(job.drafts)
        plain = [job for job in jobs if isinstance(job.grammar, GrammarCopy)]
        left = iter(plain)  # each thread takes the next one
        count = min(self._others, len(plain) - 1)
        others = [self._pool.submit(self._compute, left, words) for _ in range(count)]
        self._compute(left, words)
        for each in others:
            each.result()
        self._compute((job for job in jobs if isinstance(job.grammar, GuardedCopy)), words)

    def close(self) -> None:
        self._pool.shutdown()

    @staticmethod
    def _compute(left: Iterator[MaskJob], words: NDArray[np.int32]) -> None:
        size = words.shape[1] * words.itemsize
        for job in left:
            job.grammar.compute(words.ctypes.data + job.line * size, size, job.drafts)
