"""Moves memory between the KV caches of a server's engines, by what they need."""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from penstock.config import EngineConfig
from penstock.engine.client import StreamingClient
from penstock.messages import EngineError, RequestRejected, Resize

LOOK_SECONDS = 0.5  # between looks at what engines need
GUARANTEE = 0.5  # of an engine's equal share: it has at least this
ROOM = 1.25  # times the blocks in use: what an engine needs to go on for a while
LEAST_CHANGE = 0.05  # of an engine's largest cache: a smaller change is not worth a message

_log = logging.getLogger("penstock.repository")


class KVNeed(NamedTuple):
    """Bytes of an engine's KV cache."""

    guarantee: int  # that it keeps in any case
    most: int  # that it can use
    needed: int  # for its requests now


def divide_budget(total: int, needs: Sequence[KVNeed]) -> list[int]:
    """Returns the budget of each engine, `total` bytes together. Every engine gets its guarantee. What is left goes to
    those that need more, in equal parts as far as they need it; then to all, up to their most."""
    budgets = [each.guarantee for each in needs]
    for wanted in ([min(each.needed, each.most) for each in needs], [each.most for each in needs]):
        left = total - sum(budgets)
        open_ones = sorted(range(len(needs)), key=lambda i: wanted[i] - budgets[i])
        for place, i in enumerate(open_ones):
            part = max(min(left // (len(open_ones) - place), wanted[i] - budgets[i]), 0)
            budgets[i] += part
            left -= part
    return budgets


class _Engine:
    """An engine whose cache may change."""

    def __init__(self, client: StreamingClient, share: int) -> None:
        self.client = client
        self.share = share  # bytes
        self._preemptions = 0
        self._given = (0, 1.0)  # the last message: to which incarnation, and which part of its largest cache

    @property
    def part(self) -> float:
        """The part of its largest cache that it may use now. An engine that was started again begins with all."""
        incarnation, part = self._given
        return part if incarnation == self.client.info.incarnation else 1.0

    def need(self) -> KVNeed:
        info, stats = self.client.info, self.client.stats()
        most = max(sum(row.bytes for row in info.memory if row.name == "KV cache"), 1)
        groups = zip(stats.blocks_held, info.num_blocks, strict=False)
        used = max((held / max(total - 1, 1) for held, total in groups), default=0.0)
        lacks = stats.waiting > 0 or stats.preemptions > self._preemptions
        self._preemptions = stats.preemptions
        return KVNeed(min(int(self.share * GUARANTEE), most), most, most if lacks else int(ROOM * most * used))

    async def resize(self, part: float) -> None:
        """Gives it a part of its largest cache, if that differs enough."""
        first = self._given[0] != self.client.info.incarnation
        if abs(part - self.part) < LEAST_CHANGE and not first:
            return
        try:
            await self.client.control(Resize(part))
            self._given = (self.client.info.incarnation, part)
        except (EngineError, RequestRejected) as error:
            _log.warning("the KV cache of %s keeps its size: %s", self.client.info.model, error)


class KVBudgets:
    """The budgets of the engines of a server, which together are their equal shares."""

    def __init__(self) -> None:
        self._engines: list[_Engine] = []

    def add(self, client: StreamingClient, config: EngineConfig) -> None:
        """Adds an engine, if the size of its cache may change."""
        if config.kv_reserve_bytes is not None and config.kv_cache_bytes is not None:
            self._engines.append(_Engine(client, config.kv_cache_bytes))

    async def follow(self) -> None:
        """Moves budgets. Never returns."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._engines = [each for each in self._engines if each.client.state.status != "ended"]
            engines = [each for each in self._engines if each.client.state.status == "ready"]
            needs = [each.need() for each in engines]
            budgets = divide_budget(sum(each.share for each in engines), needs)
            parts = [budget / need.most for budget, need in zip(budgets, needs, strict=True)]
            # Memory is taken back before it is given to others.
            for engine, part in sorted(zip(engines, parts, strict=True), key=lambda pair: pair[1] - pair[0].part):
                await engine.resize(part)
