"""The disk tier: blocks of the prefix cache that outlive the engine's memory.

`DiskTier` is a state machine on the engine's thread. It never blocks: two threads, one that reads and one that writes,
do the work on files directly in the pages of leased blocks.

- Down: a block that no sequence holds any more is leased and written, the oldest first. One that is evicted before its
  turn is dropped.
- Up: a request whose blocks are on the disk, and not in memory, waits here before the scheduler has it. Its blocks are
  read into free ones, which are then published like computed ones. When the last one is there, when one cannot be
  read, or when the request has waited as long as computing them takes, the scheduler gets the request. It finds the
  blocks as a prefix hit, and computes the rest.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from penstock.engine.tier.files import PageFiles, block_name
from penstock.engine.tier.index import DiskIndex
from penstock.engine.tier.worker import Jobs
from penstock.messages import GenerateRequest
from penstock.schedule.leases import BlockLeases

READS_AT_ONCE = 4  # blocks handed to the thread that reads
WRITES_AT_ONCE = 8  # blocks handed to the thread that writes
LOOKED_AT_ONCE = 64  # keys that a step looks up to find blocks to write
POLL_SECONDS = 0.001  # between looks at the threads while there is no step
STALLED_SECONDS = 2.0  # without a block from the thread that reads: the disk hangs
RETRY_SECONDS = 1.0  # without writes after one that has failed
AGE_SECONDS = 60.0  # between checks of the blocks' age
LONGEST_WAIT = 60.0  # seconds that a request waits for its blocks while the speed of prefill is not known
NEW = 0.2  # weight of the latest measurement in a rate
LEAST_TOKENS = 32  # of prompts in a step whose speed is measured
EVICTED_PART = 128  # a full disk loses one block in so many at a time

log = logging.getLogger(__name__)


class Fetch:
    """A request's blocks on their way into memory."""

    def __init__(self, keys: list[bytes], until: float) -> None:
        self.keys = keys  # of all full blocks of the request
        self.missing: deque[bytes] = deque()  # still to be read, in the order of the prompt
        self.leased: dict[bytes, int] = {}  # blocks by key: those that were in memory, and those that have been read
        self.until = until  # the request waits no longer
        self.reading = 0  # blocks that the thread has
        self.ended = False  # the request waits no more
        self.keeps = True  # what is read is published


class DiskTier:
    """See above. `page` returns the memory of a block's page."""

    def __init__(
        self,
        files: PageFiles,
        leases: BlockLeases,
        page: Callable[[int], memoryview],
        jobs: tuple[Jobs, Jobs],
        results: "queue.SimpleQueue[Callable[[], None]]",
        *,
        block_size: int,
        most_bytes: int,
        most_seconds: float,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`jobs` read and write; `results` has what they are done with. Blocks not used for `most_seconds` are
        deleted."""
        self._files, self._leases, self._page = files, leases, page
        self._reads, self._writes = jobs
        self._results = results
        self._block_size = block_size
        self._most_blocks = most_bytes // files.file_bytes
        self._most_seconds = most_seconds
        self._wall_clock = wall_clock
        self._index = DiskIndex(files.scan())
        self._leases.retired()
        # Keys of blocks to write. A key that falls out at the front is of a block that was evicted long ago.
        self._candidates: deque[bytes] = deque(maxlen=4 * leases.total)
        self._just_written: set[bytes] = set()  # keys of blocks that are given back, which need not be written again
        self._fetches: dict[str, Fetch] = {}  # by request id
        self._reading: Fetch | None = None
        self._writing = 0
        self._clearing = 0
        self._now = self._moved = 0.0  # when `advance` was called last, and when the last read ended or the first began
        self._write_after = self._age_due = 0.0
        self._write_fails = False
        self._prompt_tokens = 0  # when the last step ended
        self._read_rate = self._prefill_rate = 0.0  # bytes and tokens per second; 0: not measured yet
        self._read = self._written = self._failed = self._dropped = 0
        self._delete(self._index.take_oldest(len(self._index) - self._most_blocks))

    # -- the engine's loop ------------------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Take what the threads have done, and give them more."""
        self._now = now
        while not self._results.empty():
            self._results.get_nowait()()
        if self._reading is not None:
            self._continue(self._reading)
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
        if self._reading is not None or self._writing or self._clearing:
            return now + POLL_SECONDS
        return max(now + POLL_SECONDS, self._write_after) if self._candidates else None

    def note_step(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step how fast prompts are computed. `prompt_tokens`: of all steps so far."""
        tokens, self._prompt_tokens = prompt_tokens - self._prompt_tokens, prompt_tokens
        if tokens >= LEAST_TOKENS and seconds > 0:
            self._prefill_rate = _blend(self._prefill_rate, tokens / seconds)

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

    # -- up ---------------------------------------------------------------------------------------------------

    def ready(self, request: GenerateRequest, now: float) -> bool:
        """Return whether the scheduler can have a request now. Else call this again, at each step."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            fetch = self._plan(request, now)
            if fetch is None:
                return True
            self._fetches[request.request_id] = fetch
        if self._reading is None:
            self._reading = fetch
            self._begin(fetch)
        done = self._reading is fetch and not fetch.missing and not fetch.reading
        if done or now >= fetch.until or self._stalls(now):
            self.forget(request.request_id)
            return True
        return False

    def forget(self, request_id: str) -> None:
        """Stop reading for a request. Blocks that have been read stay in the prefix cache."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is None:
            return
        fetch.ended = True
        fetch.missing.clear()
        self._leases.give_back([*fetch.leased.values()][::-1])
        fetch.leased.clear()
        self._finish(fetch)

    def _plan(self, request: GenerateRequest, now: float) -> Fetch | None:
        """Return the fetch of a request; None if there is nothing to read, or if computing is faster."""
        if not len(self._index) or request.sampling.prompt_logprobs is not None or self._stalls(now):
            return None
        keys = self._leases.keys(request)
        tokens = len(self._missing(keys)) * self._block_size
        if not tokens or not self._is_faster():
            return None
        return Fetch(keys, now + (tokens / self._prefill_rate if self._prefill_rate else LONGEST_WAIT))

    def _stalls(self, now: float) -> bool:
        """Return whether the thread reads, and nothing has come for too long. Requests are computed meanwhile."""
        return self._reading is not None and now >= self._moved + STALLED_SECONDS

    def _missing(self, keys: list[bytes]) -> deque[bytes]:
        """Return the keys that have to be read: up to the first block that is neither in memory nor on the disk."""
        missing = [key for key in keys if not self._leases.cached(key)]
        return deque(missing[: self._index.leading([block_name(key) for key in missing])])

    def _is_faster(self) -> bool:
        """Return whether reading a block is faster than computing it, as measured."""
        if not self._read_rate or not self._prefill_rate:
            return True
        if self._files.page_bytes / self._read_rate < self._block_size / self._prefill_rate:
            return True
        self._read_rate *= 1.02  # so that a disk that was slow once is tried again
        return False

    def _begin(self, fetch: Fetch) -> None:
        """Hold what is in memory by now, and read the rest."""
        self._moved = self._now
        fetch.missing = self._missing(fetch.keys)
        held = [key for key in fetch.keys if self._leases.cached(key)]
        fetch.leased = dict(zip(held, self._leases.lend(held), strict=True))
        self._continue(fetch)

    def _continue(self, fetch: Fetch) -> None:
        while fetch.missing and fetch.reading < READS_AT_ONCE:
            if not self._leases.spare:
                fetch.missing.clear()  # there is no memory for more: the rest is computed when the request has its turn
                return
            key = fetch.missing.popleft()
            block = self._leases.reserve()
            fetch.reading += 1
            self._reads.submit(
                partial(self._files.read, key, self._page(block)), partial(self._take, fetch, key, block)
            )

    def _take(self, fetch: Fetch, key: bytes, block: int, seconds: float | None) -> None:
        """Publish a block that was read. `seconds` is 0 or None if it could not be."""
        self._moved = self._now
        fetch.reading -= 1
        if not fetch.keeps:
            self._leases.give_back((block,))
        elif seconds:
            self._read += 1
            self._read_rate = _blend(self._read_rate, self._files.page_bytes / seconds)
            self._index.add(block_name(key), int(self._wall_clock()))
            self._leases.publish(block, key)
            if fetch.ended:
                self._leases.give_back((block,))
            else:
                fetch.leased[key] = block
        else:
            self._failed += 1
            self._index.remove(block_name(key))
            fetch.missing.clear()
            self._leases.give_back((block,))
        self._finish(fetch)

    def _finish(self, fetch: Fetch) -> None:
        """Let the next request's blocks be read once the thread that reads has none of an ended one."""
        if self._reading is fetch and fetch.ended and not fetch.reading:
            self._reading = None

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
            self._write_after = self._now + RETRY_SECONDS
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
        if self._reading is not None:
            self._reading.keeps = False
        for request_id in list(self._fetches):
            self.forget(request_id)
        self._clearing += 1
        self._writes.submit(self._files.clear, self._cleared)

    def _cleared(self, good: bool | None) -> None:
        self._clearing -= 1
        self._index.clear()  # of blocks that were being written before
        if not good:
            log.error("the KV blocks in %s could not all be deleted: delete the folder", self._files.folder)


def _blend(rate: float, measured: float) -> float:
    """Return a running mean; 0 stands for no measurement so far."""
    return (1 - NEW) * rate + NEW * measured if rate else measured
