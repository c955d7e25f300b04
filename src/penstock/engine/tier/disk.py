"""The disk tier: blocks of the prefix cache that outlive the engine's memory. Those of a GPU may also go to the host's.

`DiskTier` is a state machine on the engine's thread. It never blocks: two threads, one that reads and one that writes,
do the work on files directly in the pages of leased blocks. A block that no sequence holds any more is leased and
written, the oldest first. One that is evicted before its turn is dropped. `BlockReader` reads blocks from it.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.engine.tier.files import PageFiles, block_name
from penstock.engine.tier.host import HostPages, StagedFiles
from penstock.engine.tier.index import DiskIndex
from penstock.engine.tier.reader import LONGEST_WAIT, blend
from penstock.engine.tier.worker import Jobs
from penstock.schedule.leases import BlockLeases

READS_AT_ONCE = 4  # blocks handed to the thread that reads
WRITES_AT_ONCE = 8  # blocks handed to the thread that writes
LOOKED_AT_ONCE = 64  # keys that a step looks up to find blocks to write
POLL_SECONDS = 0.001  # between looks at the threads while there is no step
STALLED_SECONDS = 2.0  # without a block from the thread that reads: the disk hangs
RETRY_SECONDS = 1.0  # without writes after one that has failed
AGE_SECONDS = 60.0  # between checks of the blocks' age
EVICTED_PART = 128  # a full disk loses one block in so many at a time

log = logging.getLogger(__name__)


class DiskTier:
    """See above. `page` returns the memory of a block's page."""

    def __init__(
        self,
        files: PageFiles | StagedFiles | HostPages,
        leases: BlockLeases,
        page: Callable[[int], Any],
        jobs: tuple[Jobs, Jobs],
        *,
        block_size: int,
        most_bytes: int,
        most_seconds: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`jobs` read and write. Blocks not used for `most_seconds` are deleted."""
        self._files, self._leases, self._page = files, leases, page
        self.jobs, self._writes = jobs
        self.at_once, self.stalled_seconds = READS_AT_ONCE, STALLED_SECONDS
        self._block_size = block_size
        self._most_blocks = most_bytes // files.file_bytes
        self._most_seconds = most_seconds
        self._wall_clock = wall_clock
        self._index = DiskIndex(files.scan())
        self._leases.retired()
        # Keys of blocks to write. A key that falls out at the front is of a block that was evicted long ago.
        self._candidates: deque[bytes] = deque(maxlen=4 * leases.total)
        self._just_written: set[bytes] = set()  # keys of blocks that are given back, which need not be written again
        self._writing = 0
        self._clearing = 0
        self.now = 0.0  # of the engine's loop; set before the results of jobs are taken
        self._write_after = self._age_due = 0.0
        self._write_fails = False
        self._read_rate = 0.0  # bytes per second; 0: not measured yet
        self._read = self._written = self._failed = self._dropped = 0
        self._delete(self._index.take_oldest(len(self._index) - self._most_blocks))

    # -- the engine's loop ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Write what sequences have left, and delete what is old."""
        now = self.now
        for key in self._leases.retired():
            if key in self._just_written:
                self._just_written.discard(key)
            else:
                self._candidates.append(key)
        if self._candidates and now >= self._write_after:
            self._write()
        if now >= self._age_due:
            self._age_due = now + AGE_SECONDS
            self._delete(self._index.take_unused_since(max(int(self._wall_clock() - self._most_seconds), 1)))

    def due(self, now: float) -> float | None:
        """Return when `advance` is due next, if no step comes before. None if there is nothing to do."""
        if self._writing or self._clearing:
            return now + POLL_SECONDS
        return max(now + POLL_SECONDS, self._write_after) if self._candidates else None

    def counts(self) -> dict[str, int]:
        """Return the fields of EngineStats that are about the disk."""
        return {
            "disk_blocks": len(self._index),
            "disk_bytes": len(self._index) * self._files.file_bytes,
            "disk_reads": self._read,
            "disk_writes": self._written,
            "disk_failures": self._failed,
            "disk_dropped": self._dropped,
        }

    # -- up, as a PageSource ---------------------------------------------------------------------------------------

    @property
    def has_blocks(self) -> bool:
        """False while nothing can be read."""
        return len(self._index) > 0

    def leading(self, keys: list[bytes]) -> int:
        """See PageSource."""
        return self._index.leading([block_name(key) for key in keys])

    def patience(self, tokens: int, prefill_rate: float) -> float:
        """See PageSource. Reading must be faster than computing, as measured, and a request waits at most as long as
        computing takes."""
        if not self._read_rate or not prefill_rate:
            return tokens / prefill_rate if prefill_rate else LONGEST_WAIT
        if self._files.page_bytes / self._read_rate < self._block_size / prefill_rate:
            return tokens / prefill_rate
        self._read_rate *= 1.02  # so that a disk that was slow once is tried again
        return 0.0

    def begin(self, keys: list[bytes]) -> None:
        """See PageSource."""

    def read(self, key: bytes, page: memoryview) -> float:
        """See PageSource."""
        return self._files.read(key, page)

    def done(self, key: bytes, seconds: float) -> None:
        """See PageSource."""
        if seconds:
            self._read += 1
            self._read_rate = blend(self._read_rate, self._files.page_bytes / seconds)
            self._index.add(block_name(key), int(self._wall_clock()))
        else:
            self._failed += 1
            self._index.remove(block_name(key))

    def end(self) -> None:
        """See PageSource."""

    # -- down -------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        for _ in range(min(len(self._candidates), LOOKED_AT_ONCE)):
            if self._writing == WRITES_AT_ONCE or not self._leases.spare:
                return
            key = self._candidates.popleft()
            if block_name(key) in self._index:
                continue
            blocks = self._leases.lend((key,))
            if not blocks:
                self._dropped += 1
                continue
            if len(self._index) + self._writing >= self._most_blocks:
                self._delete(self._index.take_oldest(max(self._most_blocks // EVICTED_PART, 1)))
            self._writing += 1
            work = partial(self._files.write, key, self._page(blocks[0]))
            self._writes.submit(work, partial(self._wrote, key, blocks))

    def _wrote(self, key: bytes, blocks: list[int], good: bool | None) -> None:
        self._writing -= 1
        self._leases.give_back(blocks)
        if good:
            self._written += 1
            self._just_written.add(key)  # else two blocks could displace each other on a full disk forever
            self._index.add(block_name(key), int(self._wall_clock()))
        else:
            self._failed += 1
            self._write_after = self.now + RETRY_SECONDS
            if not self._write_fails:
                log.warning("KV blocks cannot be written to %s: is the disk full?", self._files.folder)
        self._write_fails = not good

    def _delete(self, names: list[int]) -> None:
        if names:
            self._writes.submit(partial(self._files.remove, names), lambda _: None)

    # -- deleted on request, and at the end -------------------------------------------------------------------

    def clear(self) -> None:
        """Delete all blocks. They are forgotten at once; their files are gone when the thread has deleted them."""
        self._index.clear()
        self._candidates.clear()
        self._just_written.clear()
        self._clearing += 1
        self._writes.submit(self._files.clear, self._cleared)

    def _cleared(self, good: bool | None) -> None:
        self._clearing -= 1
        self._index.clear()  # of blocks that were being written before
        if not good:
            log.error("the KV blocks in %s could not all be deleted: delete the folder", self._files.folder)
