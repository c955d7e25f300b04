"""Pages of another engine in the same process, without a connection: the test decides when they come, and how."""

import contextlib
import queue
from functools import partial

from penstock.engine.tier.files import is_page, page_header
from penstock.engine.tier.lender import LentPage, Loan
from penstock.engine.tier.reader import LONGEST_WAIT
from penstock.messages import PagesAt
from tests.engine.tier.engine import ManualJobs, TierEngine


class DirectPages:
    """A PageSource. The next page is damaged if `damages`, and none comes while `cut`."""

    def __init__(self, owner: TierEngine, peer: TierEngine, where: PagesAt, jobs: ManualJobs) -> None:
        self._owner, self._peer, self._where, self.jobs = owner, peer, where, jobs
        self.at_once, self.stalled_seconds = 3, LONGEST_WAIT
        self.damages = self.cut = False
        self._life = peer.scheduler  # of the peer; another one after a kill
        self._loan: Loan | None = None  # once it was begun

    def leading(self, keys: list[bytes]) -> int:
        return len(keys)

    def patience(self, tokens: int, prefill_rate: float) -> float:
        return LONGEST_WAIT

    def begin(self, keys: list[bytes]) -> None:
        self._life = self._peer.scheduler
        self._loan = Loan(keys, self._where.request_id)
        self._peer.results.put(partial(self._peer.lender.open, self._loan))

    def read(self, key: bytes, page: memoryview) -> float:
        """The peer makes steps until the page is there. It may not come: the peer may wait for its disk."""
        for _ in range(50):
            if self.cut or self._loan is None or self._life is not self._peer.scheduler:
                break
            with contextlib.suppress(queue.Empty):
                lent = self._loan.pages.get_nowait()
                return 0.0 if lent is None else self._receive(lent, key, page)
            self._peer.step()
        return 0.0

    def _receive(self, lent: LentPage, key: bytes, page: memoryview) -> float:
        header = page_header(lent.key, lent.page)
        page[:] = lent.page
        self._peer.results.put(partial(self._peer.lender.sent_page, self._loan, lent.block))
        if self.damages:
            page[0] ^= 1
        return 1e-3 if is_page(header, key, page) else 0.0

    def done(self, key: bytes, seconds: float) -> None:
        self._owner.tiers.count(seconds > 0.0)

    def end(self) -> None:
        self.cut = True
        loan, self._loan = self._loan, None
        if loan is not None and self._life is self._peer.scheduler:
            self._peer.results.put(partial(self._peer.lender.close, loan))
