"""Reads blocks of the prefix cache for requests, before the scheduler has them.

`BlockReader` is a state machine on the engine's thread, which never blocks. A request whose blocks are on the disk or
at another engine, and not in memory, waits here. Its blocks are read into free ones, by a thread of their source, and
are then published like computed ones. When the last one is there, when one cannot be read, or when the request has
waited for too long, the scheduler gets the request. It finds the blocks as a prefix hit, and computes the rest.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from penstock.engine.tier.worker import Jobs
from penstock.messages import GenerateRequest
from penstock.schedule.leases import BlockLeases

MOST_READING = 64  # requests whose blocks are read at a time, each from a source of its own; others wait
LONGEST_WAIT = 60.0  # seconds that a request waits for its blocks while the speed of prefill is not known
NEW = 0.2  # weight of the latest measurement in a rate
LEAST_TOKENS = 32  # of prompts in a step whose speed is measured


class PageSource(Protocol):
    """A place that blocks are read from, for one request at a time."""

    jobs: Jobs  # runs `read`
    at_once: int  # blocks handed to `jobs`
    stalled_seconds: float  # without a block, after which requests wait no longer

    def leading(self, keys: list[bytes]) -> int:
        """Return how many of the first `keys` it has or will have."""

    def patience(self, tokens: int, prefill_rate: float) -> float:
        """Return for how many seconds a request should wait for the blocks of `tokens`; 0: compute them instead. The
        rate is in tokens per second, 0 before one was measured."""

    def begin(self, keys: list[bytes]) -> None:
        """Note that these blocks will be read, in this order, until `end`."""

    def read(self, key: bytes, page: memoryview) -> float:
        """Read a block into `page`, on a thread. Returns the seconds that it took; 0 if it cannot be read, and then
        `page` has any content."""

    def done(self, key: bytes, seconds: float) -> None:
        """Note what a `read` has returned; 0 also if it has raised an exception."""

    def end(self) -> None:
        """Note that the request waits no longer. Reads that were begun should end soon."""


class Fetch:
    """A request's blocks on their way into memory."""

    def __init__(self, source: PageSource, keys: list[bytes], until: float) -> None:
        self.source = source
        self.keys = keys  # of all full blocks of the request
        self.missing: deque[bytes] = deque()  # still to be read, in the order of the prompt
        self.leased: dict[bytes, int] = {}  # blocks by key: those that were in memory, and those that have been read
        self.until = until  # the request waits no longer
        self.moved = 0.0  # when the last block came, or the first read began
        self.reading = 0  # blocks that the thread has
        self.ended = False  # the request waits no more
        self.keeps = True  # what is read is published


class BlockReader:
    """See above."""

    def __init__(
        self,
        leases: BlockLeases,
        page: Callable[[int], memoryview],
        block_size: int,
        source: Callable[[GenerateRequest], PageSource | None],
    ) -> None:
        """`page` returns the memory of a block's page. `source` returns where a request's blocks may be; None: nowhere
        but in memory."""
        self._leases, self._page, self._source = leases, page, source
        self._block_size = block_size
        self._fetches: dict[str, Fetch] = {}  # by request id
        self._reading: dict[PageSource, Fetch] = {}
        self._prompt_tokens = 0  # when the last step ended
        self.prefill_rate = 0.0  # tokens per second; 0: not measured yet
        self.now = 0.0  # of the engine's loop; set before the results of jobs are taken

    @property
    def busy(self) -> bool:
        """True while threads read."""
        return bool(self._reading)

    def waits(self, request_id: str) -> bool:
        """Return whether a request waits here."""
        return request_id in self._fetches

    def advance(self) -> None:
        """Give the threads more to read."""
        for fetch in list(self._reading.values()):
            self._continue(fetch)

    def note_step(self, prompt_tokens: int, seconds: float) -> None:
        """Learn from a step how fast prompts are computed. `prompt_tokens`: of all steps so far."""
        tokens, self._prompt_tokens = prompt_tokens - self._prompt_tokens, prompt_tokens
        if tokens >= LEAST_TOKENS and seconds > 0:
            self.prefill_rate = blend(self.prefill_rate, tokens / seconds)

    def ready(self, request: GenerateRequest, now: float) -> bool:
        """Return whether the scheduler can have a request now. Else call this again, at each step."""
        fetch = self._fetches.get(request.request_id)
        if fetch is None:
            fetch = self._plan(request, now)
            if fetch is None:
                return True
            self._fetches[request.request_id] = fetch
        if fetch.source not in self._reading and len(self._reading) < MOST_READING:
            self._begin(fetch)
        done = self._reading.get(fetch.source) is fetch and not fetch.missing and not fetch.reading
        if done or now >= fetch.until or self._stalls(fetch.source, now):
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
        if self._reading.get(fetch.source) is fetch:
            fetch.source.end()
            self._finish(fetch)

    def clear(self) -> None:
        """Stop reading for all requests, and publish nothing that is being read."""
        for fetch in self._reading.values():
            fetch.keeps = False
        for request_id in list(self._fetches):
            self.forget(request_id)

    def _plan(self, request: GenerateRequest, now: float) -> Fetch | None:
        """Return the fetch of a request; None if there is nothing to read, or if computing is faster."""
        if request.sampling.prompt_logprobs is not None:
            return None
        source = self._source(request)
        if source is None or self._stalls(source, now):
            return None
        keys = self._leases.keys(request)
        tokens = len(self._missing(source, keys)) * self._block_size
        seconds = source.patience(tokens, self.prefill_rate) if tokens else 0.0
        return Fetch(source, keys, now + seconds) if seconds else None

    def _stalls(self, source: PageSource, now: float) -> bool:
        """Return whether a source is read, and nothing has come for too long. Requests are computed meanwhile."""
        fetch = self._reading.get(source)
        return fetch is not None and now >= fetch.moved + source.stalled_seconds

    def _missing(self, source: PageSource, keys: list[bytes]) -> deque[bytes]:
        """Return the keys that have to be read: up to the first block that is neither in memory nor in the source."""
        missing = [key for key in keys if not self._leases.cached(key)]
        return deque(missing[: source.leading(missing)])

    def _begin(self, fetch: Fetch) -> None:
        """Hold what is in memory by now, and read the rest."""
        self._reading[fetch.source] = fetch
        fetch.moved = self.now
        fetch.missing = self._missing(fetch.source, fetch.keys)
        held = [key for key in fetch.keys if self._leases.cached(key)]
        fetch.leased = dict(zip(held, self._leases.lend(held), strict=True))
        fetch.source.begin(list(fetch.missing))
        self._continue(fetch)

    def _continue(self, fetch: Fetch) -> None:
        source = fetch.source
        while fetch.missing and fetch.reading < source.at_once:
            if not self._leases.spare:
                fetch.missing.clear()  # there is no memory for more: the rest is computed when the request has its turn
                return
            key = fetch.missing.popleft()
            block = self._leases.reserve()
            fetch.reading += 1
            source.jobs.submit(partial(source.read, key, self._page(block)), partial(self._take, fetch, key, block))

    def _take(self, fetch: Fetch, key: bytes, block: int, seconds: float | None) -> None:
        """Publish a block that was read. `seconds` is 0 or None if it could not be."""
        fetch.moved = self.now
        fetch.reading -= 1
        if fetch.keeps:
            fetch.source.done(key, seconds or 0.0)
        if not (fetch.keeps and seconds):
            fetch.missing.clear()
            self._leases.give_back((block,))
        else:
            self._leases.publish(block, key)
            if fetch.ended:
                self._leases.give_back((block,))
            else:
                fetch.leased[key] = block
        self._finish(fetch)

    def _finish(self, fetch: Fetch) -> None:
        """Let the source be read for another request once its thread has no block for an ended one."""
        if fetch.ended and not fetch.reading and self._reading.get(fetch.source) is fetch:
            del self._reading[fetch.source]


def blend(rate: float, measured: float) -> float:
    """Return a running mean; 0 stands for no measurement so far."""
    return (1 - NEW) * rate + NEW * measured if rate else measured
