"""Which blocks of the prefix cache each engine has, from the engines' own reports.

It is a hint: a wrong entry costs a prefill, never a token. An engine reports numbered changes (`BlockChanges`); the
first report has everything. After a missing number the reader asks for a new first report, and what is known stays
until that comes. Reports of an earlier incarnation are refused.

Blocks of a request that was just sent count as stored for a short time, since prompts that begin equally often come
together, before the engine reports anything.
"""

from bisect import bisect_left
from collections.abc import Sequence

from penstock.messages import BlockChanges

ENTRY_BYTES = 200  # of an entry, measured with benchmarks/fleet.py: the key, and its place in a set
BOOKED_SECONDS = 10.0  # that a booked block counts at least; at most twice as long


class _CachedKeys:
    """The blocks of one engine."""

    __slots__ = ("_asked", "_last", "booked", "booked_before", "incarnation", "stored")

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self._last = 0  # number of the last report
        self._asked = False  # for a first report, since one was missed
        self.stored: set[bytes] = set()
        self.booked: set[bytes] = set()
        self.booked_before: set[bytes] = set()

    def __len__(self) -> int:
        return len(self.stored) + len(self.booked) + len(self.booked_before)

    def follows(self, number: int) -> bool | None:
        """Take the number of a report. Returns whether it can be used; None if a first one must be asked for."""
        last, self._last = self._last, number
        if number == 1:
            self.stored = set()
            self._asked = False
            return True
        if number == last + 1 and not self._asked:
            return True
        asked, self._asked = self._asked and number > last, True
        return False if asked else None


class BlockIndex:
    """The blocks of all engines, bounded in bytes. Times are in seconds on the caller's clock."""

    def __init__(self, max_bytes: int = 256 << 20) -> None:
        """Each engine's share of `max_bytes` is equal. Blocks beyond it are not kept, and count as `dropped`."""
        self._max_entries = max_bytes // ENTRY_BYTES
        self._engines: dict[str, _CachedKeys] = {}
        self._rotated = 0.0  # when bookings became old
        self.dropped = 0

    def __len__(self) -> int:
        """The number of entries. A block that two engines have is two."""
        return sum(map(len, self._engines.values()))

    def join(self, name: str, incarnation: int) -> None:
        """Begin anew with an engine. Its first report is number 1."""
        self._engines[name] = _CachedKeys(incarnation)

    def leave(self, name: str) -> None:
        """Forget an engine."""
        self._engines.pop(name, None)

    def apply(self, name: str, incarnation: int, changes: BlockChanges) -> bool:
        """Take a report. Returns False if reports were missed, so that the caller must ask for a first one."""
        engine = self._engines.get(name)
        if engine is None or engine.incarnation != incarnation:
            return True  # of an engine that has ended
        follows = engine.follows(changes.number)
        if not follows:
            return follows is not None
        for known in (engine.stored, engine.booked, engine.booked_before):
            known.difference_update(changes.removed)
        room = self._share - len(engine)
        if len(changes.stored) > room:
            self.dropped += len(changes.stored) - max(room, 0)
        engine.stored.update(changes.stored[: max(room, 0)])
        return True

    def book(self, name: str, keys: Sequence[bytes], now: float) -> None:
        """Count blocks as stored for a short time, because a request with them was sent to the engine."""
        engine = self._engines.get(name)
        if engine is not None:
            self._expire(now)
            engine.booked.update(keys[: max(self._share - len(engine), 0)])

    def match(self, keys: Sequence[bytes], now: float) -> dict[str, int]:
        """Return how many of the first `keys` each engine has, without those that have none.

        A block is evicted before those that it follows, and bookings begin with the first block, so each set has the
        keys up to some place, which is found by bisection.
        """
        found: dict[str, int] = {}
        if not keys:
            return found
        self._expire(now)
        first, backwards, most = keys[0], keys[::-1], len(keys)
        for name, engine in self._engines.items():
            count = 0
            for known in (engine.stored, engine.booked, engine.booked_before):
                if first in known:  # then those that it has are at the end of `backwards`
                    count = max(count, most - bisect_left(backwards, True, key=known.__contains__))
            if count:
                found[name] = count
        return found

    def _expire(self, now: float) -> None:
        """Forget old bookings."""
        passed = now - self._rotated
        if passed >= BOOKED_SECONDS:
            for engine in self._engines.values():
                engine.booked_before = engine.booked if passed < 2 * BOOKED_SECONDS else set()
                engine.booked = set()
            self._rotated = now

    @property
    def _share(self) -> int:
        return self._max_entries // max(len(self._engines), 1)
