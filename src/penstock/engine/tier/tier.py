"""The places beside the engine's memory where KV blocks are kept or come from: a disk, and other engines.

Both are optional. `BlockTiers` is what the engine's loop calls; the parts are state machines on its thread.
"""

from penstock.engine.tier.disk import POLL_SECONDS, DiskTier
from penstock.engine.tier.lender import Lender
from penstock.engine.tier.reader import BlockReader
from penstock.engine.tier.worker import Results


class BlockTiers:
    """See above."""

    def __init__(
        self,
        reader: BlockReader,
        results: Results,
        *,
        disk: DiskTier | None = None,
        lender: Lender | None = None,
        page_port: int = 0,
    ) -> None:
        """`results` has what threads have done. Other engines read blocks at `page_port`; 0: none do."""
        self.reader, self._results = reader, results
        self._disk, self._lender = disk, lender
        self.page_port = page_port
        self.received = self.cut_short = 0

    def advance(self, now: float) -> None:
        """Take what the threads have done, and give them more."""
        reader, disk, lender = self.reader, self._disk, self._lender
        reader.now = now
        if disk is not None:
            disk.now = now
        if lender is not None:
            lender.now = now
        while not self._results.empty():
            self._results.get_nowait()()
        reader.advance()
        if disk is not None:
            disk.advance()
        if lender is not None:
            lender.advance()

    def due(self, now: float) -> float | None:
        """Return when `advance` is due next, if no step comes before. None if there is nothing to do."""
        if self.reader.busy or (self._lender is not None and self._lender.busy):
            return now + POLL_SECONDS
        return None if self._disk is None else self._disk.due(now)

    def count(self, good: bool) -> None:
        """Count a block that has come from another engine, or a request that did not get all of its blocks."""
        if good:
            self.received += 1
        else:
            self.cut_short += 1

    def counts(self) -> dict[str, int]:
        """Return the fields of EngineStats that are about tiers."""
        sent = 0 if self._lender is None else self._lender.sent
        counts = {"peer_reads": self.received, "peer_failures": self.cut_short, "peer_sends": sent}
        return counts if self._disk is None else counts | self._disk.counts()

    def clear(self) -> None:
        """Delete all blocks on the disk, and publish nothing that is being read."""
        self.reader.clear()
        if self._disk is not None:
            self._disk.clear()
