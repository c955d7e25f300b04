"""The dynamic batcher of one-shot models: which waiting requests run together, and when.

A pure state machine like the scheduler: it reads no clock, and time is an argument, in seconds. The driver calls `add`,
`cancel`, `plan`, `apply` and `drop_late`, and calls again at `next_due`.

The queue has levels; level 1 goes first. Within a level requests go in order of arrival. A batch takes waiting requests
from the front as long as they have the same shapes and their rows fit.
"""

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from itertools import chain
from typing import Literal, NamedTuple

import msgspec

Reason = Literal["full", "preferred", "idle", "waited", "shapes", "single"]
Refusal = Literal["queue", "level"]


GATHER_SECONDS = 0.004  # that a request waits at most because of `Batcher.gather`


class LevelRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """The rules of a level of the queue. Times are in seconds; 0 means no limit."""

    max_queue: int = 1024  # requests that wait
    timeout: float = 0.0  # that a request may wait
    late: Literal["refuse", "delay"] = "refuse"  # delay: a request that is late goes behind the others
    override: bool = True  # requests may set a shorter timeout


class BatchRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """How the requests of a model are batched. Settings have these fields, except the last three."""

    mode: Literal["dynamic", "static", "none"] = "dynamic"  # static: collect max_rows; none: each request runs alone
    max_wait: float = 0.0  # seconds that a request waits for others
    wait: Literal["busy", "always"] = "busy"  # always: wait for max_wait also while nothing runs
    preferred: tuple[int, ...] = ()  # rows; a batch of such a size does not wait
    keep_order: bool = False  # results leave in the order of arrival
    levels: tuple[LevelRules, ...] = (LevelRules(),)
    default_level: int = 1
    max_rows: int = 1  # of a batch
    instances: int = 1  # batches that run at a time
    starts_after: int = 0  # requests that must wait before the first batch, for tests


class Batch(msgspec.Struct, frozen=True):
    """Requests that run together."""

    id: int
    requests: tuple[int, ...]
    rows: int
    reason: Reason


class _Waiting(msgspec.Struct, eq=False):
    id: int
    rows: int
    group: Hashable
    arrived: float
    due: float | None  # when it is late


class _Level(NamedTuple):
    rules: LevelRules
    queue: deque[_Waiting]
    late: deque[_Waiting]  # those whose time is over: they run after the others of their level


class Batcher:
    """The queue of one version of a model."""

    def __init__(self, rules: BatchRules) -> None:
        self.rules = rules
        self.reasons: Counter[Reason] = Counter()  # of the batches so far
        self._levels = [_Level(each, deque(), deque()) for each in rules.levels]
        self._queues = [queue for level in self._levels for queue in (level.queue, level.late)]  # the first runs first
        self._running: dict[int, tuple[int, ...]] = {}
        self._order: deque[int] = deque()  # requests whose results have not left, in order of arrival
        self._finished: set[int] = set()
        self._batches = 0
        self.waiting = 0  # requests
        self._rows = 0  # of these
        self._since = 0.0  # when the first of these arrived
        self._gather = 0
        self._held = rules.starts_after
        self._timeouts = False  # whether a request has ever had one

    @property
    def running(self) -> int:
        """The number of batches that run."""
        return len(self._running)

    def gather(self, rows: int) -> None:
        """Has the next batches wait for so many rows also while nothing runs, as each batch costs time that requests
        lack. Rules that say themselves for what to wait are not changed."""
        rules = self.rules
        free = rules.mode == "dynamic" and not rules.preferred and not rules.max_wait
        self._gather = min(rows, rules.max_rows) if free else 0

    def add(
        self, request: int, rows: int, group: Hashable, now: float, *, level: int = 0, timeout: float | None = None
    ) -> Refusal | None:
        """Queues a request, or returns the limit that it breaks. Requests with equal `group` may share a batch. A level
        that does not exist is the default one. `rows` must be at most `max_rows`."""
        number = level if 1 <= level <= len(self._levels) else self.rules.default_level
        rules, queue, late = self._levels[number - 1]
        if rules.max_queue and len(queue) + len(late) >= rules.max_queue:
            return "queue"
        limit = rules.timeout
        if rules.override and timeout and (not limit or timeout < limit):
            limit = timeout
        if limit:
            self._timeouts = True
        if not self.waiting:
            self._since = now
        self.waiting += 1
        self._rows += rows
        queue.append(_Waiting(request, rows, group, now, now + limit if limit else None))
        if self.rules.keep_order:
            self._order.append(request)
        return None

    def cancel(self, request: int) -> bool:
        """Removes a request that waits. Returns False if it runs or has ended."""
        for queue in self._queues:
            for each in queue:
                if each.id == request:
                    queue.remove(each)
                    self._forget(each)
                    return True
        return False

    def drop_late(self, now: float) -> list[int]:
        """Removes and returns the requests that have waited too long, and moves those that are only delayed."""
        if not self._timeouts:
            return []
        dropped = []
        for rules, queue, late in self._levels:
            overdue = [each for each in queue if each.due is not None and each.due <= now]
            for each in overdue:
                queue.remove(each)
                if rules.late == "delay":
                    each.due = None
                    late.append(each)
                else:
                    self._forget(each)
                    dropped.append(each.id)
        return dropped

    def due(self, now: float) -> bool:
        """Returns whether `plan` would return a batch."""
        return self._may_run(now) and self._choose(now)[1] is not None

    def plan(self, now: float) -> Batch | None:
        """Returns the next batch that should run now; None: nothing is due or no instance is free."""
        if not self._may_run(now):
            return None
        self._held = 0
        chosen, reason = self._choose(now)
        if reason is None:
            return None
        left = len(chosen)  # they are the first ones
        for queue in self._queues:
            while left and queue:
                queue.popleft()
                left -= 1
        self._batches += 1
        batch = Batch(self._batches, tuple([each.id for each in chosen]), sum([each.rows for each in chosen]), reason)
        self.waiting -= len(chosen)
        self._rows -= batch.rows
        if self.waiting:
            self._since = _oldest(chain(*self._queues))
        self._running[batch.id] = batch.requests
        self.reasons[reason] += 1
        return batch

    def free_for(self, rows: int) -> bool:
        """Returns whether `plan` would return a batch of these rows at once if they were added now."""
        rules = self.rules
        at_once = rules.mode == "dynamic" and not (rules.max_wait and rules.wait == "always") and not self._held
        free = not self.waiting and len(self._running) < rules.instances
        return at_once and free and rows <= rules.max_rows and not rules.keep_order

    def follow(self, rows: int) -> Batch:
        """Begins a batch of requests that never waited here, for which the batcher is free. It ends with `apply`."""
        self._batches += 1
        batch = Batch(self._batches, (), rows, "idle")
        self._running[batch.id] = ()
        self.reasons["idle"] += 1
        return batch

    def apply(self, batch: Batch) -> list[int]:
        """Takes the end of a batch. Returns the requests whose results may leave now, in order."""
        requests = self._running.pop(batch.id)
        if not self.rules.keep_order:
            return list(requests)
        self._finished.update(requests)
        return self._leaving()

    def leaving(self) -> list[int]:
        """Returns finished requests whose results were kept back behind one that was cancelled or dropped."""
        return self._leaving() if self.rules.keep_order else []

    def next_due(self) -> float | None:
        """Returns when `drop_late` or `plan` should be called although nothing has happened; None: not at all."""
        times = [each.due for queue in self._queues for each in queue if each.due is not None] if self._timeouts else []
        if self.waiting and not self._held and len(self._running) < self.rules.instances:
            if self.rules.max_wait:
                times.append(_oldest(self._choose(-math.inf)[0]) + self.rules.max_wait)
            if self._gather:
                times.append(self._since + GATHER_SECONDS)
        return min(times, default=None)

    def _may_run(self, now: float) -> bool:
        if len(self._running) >= self.rules.instances or self.waiting < (self._held or 1):
            return False
        return self._rows >= self._gather or now >= self._since + GATHER_SECONDS

    def _choose(self, now: float) -> tuple[list[_Waiting], Reason | None]:
        """The requests of the next batch, and why it runs now; None: it waits."""
        rules = self.rules
        if rules.mode == "none":
            return [next(chain(*self._queues))], "single"
        first: Hashable = None
        chosen: list[_Waiting] = []
        best, rows = 0, 0  # of a preferred size: how many requests
        reason: Reason | None = None
        for each in chain(*self._queues):
            if chosen and each.group != first:
                reason = "shapes"
                break
            if rows + each.rows > rules.max_rows:
                reason = "full"
                break
            if not best and chosen and rules.preferred and rows + each.rows > max(rules.preferred):
                best = len(chosen)  # it cannot grow to a preferred size any more
            first = each.group
            chosen.append(each)
            rows += each.rows
            if rows in rules.preferred:
                best = len(chosen)
            if rows == rules.max_rows:
                reason = "full"
                break
        exceeded = bool(rules.max_wait) and now >= _oldest(chosen) + rules.max_wait
        if best and not exceeded:
            return chosen[:best], "preferred"
        if reason is None and rules.preferred and rows > max(rules.preferred):
            reason = "full"
        # Off-peak: while nothing runs, waiting for others would only add latency.
        off_peak = not rules.max_wait or (rules.wait == "busy" and not self._running)
        if reason is None and rules.mode == "dynamic" and off_peak:
            reason = "idle"
        if reason is None and (exceeded or not rules.max_wait):
            reason = "waited"
        return chosen, reason

    def _forget(self, gone: _Waiting) -> None:
        self.waiting -= 1
        self._rows -= gone.rows
        if self.rules.keep_order:
            self._order.remove(gone.id)

    def _leaving(self) -> list[int]:
        found = []
        while self._order and self._order[0] in self._finished:
            request = self._order.popleft()
            self._finished.discard(request)
            found.append(request)
        return found


def _oldest(requests: Iterable[_Waiting]) -> float:
    """When the first of these arrived."""
    return min([each.arrived for each in requests])
