"""Lends blocks of the prefix cache to other engines, while the prompts that they belong to are still being computed.

`Lender` is on the engine's thread, and a thread for each reader sends the pages (peers.py). A block is leased from when
it is handed to that thread until its page has left, so it is neither evicted nor written meanwhile.
"""

import queue
from collections.abc import Callable
from typing import NamedTuple

from penstock.schedule.leases import BlockLeases

LENT_AT_ONCE = 256  # blocks of a loan: the prompt tokens of a large step
GRACE_SECONDS = 2.0  # in which the request that computes a loan's blocks must come


class LentPage(NamedTuple):
    """A leased block on its way to a reader."""

    key: bytes
    block: int
    page: memoryview


class Loan:
    """The blocks that one reader wants, in the order in which it wants them."""

    def __init__(self, keys: list[bytes], request_id: str) -> None:
        """`request_id` is of the request that computes them here; "": none, so the reader gets what is there now."""
        self.keys, self.request_id = keys, request_id
        self.pages: queue.SimpleQueue[LentPage | None] = queue.SimpleQueue()  # to send; None: no more will come
        self.next = 0  # index of the first key that is not lent yet
        self.ended = False  # nothing more is lent
        self.blocks: list[int] = []  # leased for it
        self.until = 0.0  # when it ends, if its request has not come


class Lender:
    """See above. `page` returns the memory of a block's page, and `computes` whether a request is in this engine."""

    def __init__(self, leases: BlockLeases, page: Callable[[int], memoryview], computes: Callable[[str], bool]) -> None:
        self._leases, self._page, self._computes = leases, page, computes
        self._loans: list[Loan] = []
        self.now = 0.0  # of the engine's loop; set before the results of jobs are taken
        self.sent = 0  # blocks so far

    @property
    def busy(self) -> bool:
        """True while a reader wants blocks."""
        return bool(self._loans)

    def open(self, loan: Loan) -> None:
        """Begin to lend."""
        loan.until = self.now + GRACE_SECONDS if loan.request_id else 0.0
        self._loans.append(loan)

    def sent_page(self, loan: Loan, block: int) -> None:
        """Take a block back whose page has left."""
        self.sent += 1
        loan.blocks.remove(block)
        self._leases.give_back((block,))

    def close(self, loan: Loan) -> None:
        """Take back all that is lent to a reader, whose thread sends nothing more."""
        self._loans.remove(loan)
        self._leases.give_back(loan.blocks)
        loan.blocks = []

    def advance(self) -> None:
        """Lend the blocks that have been computed since the last call."""
        for loan in self._loans:
            if not loan.ended:
                self._lend(loan)

    def _lend(self, loan: Loan) -> None:
        while loan.next < len(loan.keys) and len(loan.blocks) < LENT_AT_ONCE and self._leases.spare:
            key = loan.keys[loan.next]
            blocks = self._leases.lend((key,))
            if not blocks:
                loan.ended = self._will_not_come(loan)
                break
            loan.next += 1
            loan.blocks += blocks
            loan.pages.put(LentPage(key, blocks[0], self._page(blocks[0])))
        loan.ended = loan.ended or loan.next == len(loan.keys)
        if loan.ended:
            loan.pages.put(None)

    def _will_not_come(self, loan: Loan) -> bool:
        """Return whether the next block will not be computed here: its request has ended, or has not come in time."""
        if self._computes(loan.request_id):
            loan.until = 0.0
            return False
        return self.now >= loan.until
