"""A grammar that may be slow, followed on lanes (lanes.py)."""

import ctypes
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.messages import GRAMMARS_BUSY
from penstock.text.grammars.copies import GrammarCopy
from penstock.text.grammars.lanes import Lanes, Task


class GuardedCopy:
    """Follows one output as a GrammarCopy does. No step waits for a call of llguidance that takes more than
    CALL_SECONDS: the output then ends with an error.

    As soon as a token is there, a lane consumes it and computes the mask of the next one. The caller's thread calls
    nothing that locks the lexer: it would wait for another output of the same grammar.
    """

    __slots__ = ("_ahead", "_copy", "_drafts", "_lanes", "_masked", "_masks", "_task", "_words")

    def __init__(self, copy: GrammarCopy, lanes: Lanes, words: int) -> None:
        """`words`: of a mask."""
        self._copy, self._lanes, self._words = copy, lanes, words
        self._ahead: deque[int] = deque()  # tokens that the grammar has not consumed yet
        self._task: Task | None = None
        self._drafts: tuple[int, ...] = ()  # those of the task
        self._masked: tuple[int, ...] | None = None  # the drafts that `_masks` are for
        self._masks: NDArray[np.uint32] = np.empty((0, words), np.uint32)  # of the next token and after each draft
        if lanes.full and not copy.error:
            copy.error = f"{GRAMMARS_BUSY}; send the request again later"

    @property
    def error(self) -> str:
        """As far as it is known; see `settle`."""
        return self._copy.error

    def settle(self) -> str:
        """Returns the error after all tokens so far; empty if the output can continue."""
        while self._task is not None:
            self._lanes.wait(self._task)
            self._task = None
            if self._ahead and not self.error:  # a token came after the lane had looked
                self._submit(self._drafts)
        return self.error

    def consume(self, token_id: int) -> None:
        self._ahead.append(token_id)
        self._masked = None
        if self._task is None:
            self._submit(())

    def start(self, drafts: Sequence[int]) -> None:
        """Begins to compute the masks that `compute` needs."""
        wanted = tuple(drafts)
        if not self.settle() and self._masked != wanted:
            self._submit(wanted)

    def compute(self, address: int, size: int, drafts: Sequence[int]) -> None:
        self.start(drafts)
        if not self.settle():
            ctypes.memmove(address, self._masks.ctypes.data, size * (1 + len(drafts)))

    def forced(self) -> Sequence[int]:
        """Returns the token that is the only one allowed next: the mask says that without the lexer."""
        self.start(())
        if self.settle():
            return ()
        (words,) = self._masks[0].nonzero()
        bits = int(self._masks[0, words[0]]) if len(words) == 1 else 0
        return (32 * int(words[0]) + bits.bit_length() - 1,) if bits.bit_count() == 1 else ()

    def _submit(self, drafts: tuple[int, ...]) -> None:
        self._drafts = drafts
        self._task = Task(self._copy, self._follow)
        self._lanes.submit(self._task)

    def _follow(self) -> None:
        """Runs on a lane."""
        copy, drafts = self._copy, self._drafts
        masks = np.full((2 + len(drafts), self._words), 0xFFFFFFFF, np.uint32)  # the last one is no mask
        while True:
            while self._ahead and not copy.error:
                copy.consume(self._ahead.popleft())
            if copy.error:
                return
            copy.compute(masks.ctypes.data, masks[0].nbytes, list(drafts))
            self._masks = masks
            if not self._ahead:
                self._masked = drafts
                return
