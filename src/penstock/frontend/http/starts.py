"""Lets requests begin one after the other."""

import asyncio
from collections import deque
from collections.abc import Callable

Gone = Callable[[], bool]


class RequestStarts:
    """Lets one request begin in each iteration of the event loop: of each tenant in turn, in the order in which they
    came.

    To begin takes about a millisecond: the body is decoded, rendered and tokenised. If many requests began in one
    iteration, as when clients send and cancel without pause, every stream would wait for all of them.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[tuple[asyncio.Future[bool], Gone]]] = {}  # by tenant, the next one first
        self._scheduled = False

    async def next(self, gone: Gone, tenant: str = "") -> bool:
        """Returns when the caller may begin: True, or False if its client has gone meanwhile, as `gone` says."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append((turn, gone))
        self._schedule()
        return await turn

    def _schedule(self) -> None:
        if self._waiting and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._let_in)

    def _let_in(self) -> None:
        self._scheduled = False
        while self._waiting:
            tenant = next(iter(self._waiting))
            line = self._waiting.pop(tenant)
            turn, gone = line.popleft()
            if line:
                self._waiting[tenant] = line  # behind the others
            if turn.cancelled():
                continue
            there = not gone()
            turn.set_result(there)
            if there:
                break
        self._schedule()
