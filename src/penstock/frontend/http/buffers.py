"""One budget for the bodies of all requests that are being received or decoded, and the return of their memory."""

import asyncio
import ctypes
from collections.abc import Callable

from penstock.frontend.errors import APIError

_TRIM_BYTES = 16 << 20  # freed since the last trim: less is not worth the time
_TRIM_SECONDS = 1.0  # from the first release to the trim, which so follows many releases


class BodyBuffers:
    """Counts the bytes of all buffered bodies."""

    def __init__(self, limit: int, retry_after: int) -> None:
        """`limit` is in bytes; `retry_after` is in seconds, for the error."""
        self._limit = limit
        self._retry_after = retry_after
        self._trim: Callable[[int], int] | None = _find_trim()
        self._freed = 0
        self._trimming = False
        self._turn = asyncio.Lock()
        self.used = 0

    async def turn(self) -> None:
        """Returns for one caller in each iteration of the event loop, so that the work of many requests, a few
        milliseconds each, is spread over as many iterations."""
        await self._turn.acquire()
        asyncio.get_running_loop().call_soon(self._turn.release)

    def hold(self) -> "HeldBytes":
        """Returns the count of one body, which is empty at first."""
        return HeldBytes(self)

    def take(self, count: int, *, may_pass: bool = False) -> None:
        """Raises APIError 429 if the bodies of all requests together would pass the limit, unless they may."""
        if self.used + count > self._limit and not may_pass:
            raise APIError(
                429,
                f"the server holds {self.used} bytes of requests that are not complete; the limit is {self._limit} in "
                "total: try again later",
                code="too_many_bodies",
                retry_after=self._retry_after,
                close=True,
            )
        self.used += count

    def give(self, count: int) -> None:
        self.used -= count
        self._freed += count
        if self._freed >= _TRIM_BYTES and self._trim is not None and not self._trimming:
            self._trimming = True
            asyncio.get_running_loop().call_later(_TRIM_SECONDS, self._start_trim)

    def _start_trim(self) -> None:
        """Returns free memory to the system. The C library would keep what lies between blocks in use."""
        self._trimming = False
        self._freed = 0
        if self._trim is not None:
            asyncio.get_running_loop().run_in_executor(None, self._trim, 0)


class HeldBytes:
    """The bytes of one body within the budget."""

    __slots__ = ("_buffers", "_count")

    def __init__(self, buffers: BodyBuffers) -> None:
        self._buffers = buffers
        self._count = 0

    async def turn(self) -> None:
        """Waits for a turn before a few milliseconds of work on this body."""
        await self._buffers.turn()

    def add(self, count: int) -> None:
        """Adds bytes that arrived. Raises APIError 429 if the budget is spent."""
        self._buffers.take(count)
        self._count += count

    def add_stored(self, count: int) -> None:
        """As add, of bytes that the server stores, which cannot be refused for ever: where no other body is held they
        may pass the budget."""
        self._buffers.take(count, may_pass=self._buffers.used == self._count)
        self._count += count

    def release(self) -> None:
        """Gives all bytes back. The body is no longer needed."""
        if self._count:
            self._buffers.give(self._count)
            self._count = 0


def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, or None where the C library is another one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
