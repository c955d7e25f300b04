"""Bounds the memory of bodies and of large answers, each by a budget of bytes, and gives freed memory to the system.

Bodies count while they are received and decoded, answers while they are made and until their clients have read them.
"""

import asyncio
import ctypes
from collections.abc import Callable
from functools import partial

from penstock.frontend.errors import APIError
from penstock.frontend.limits import RequestLimits

_TRIM_BYTES = 16 << 20  # freed since the last trim: less is not worth the time
_TRIM_SECONDS = 1.0  # from the first release to the trim, which so follows many releases
SMALL_ANSWER = 64 << 10  # bytes; the socket's own buffer may have as many

Refusal = Callable[[int, int], APIError]  # makes the error from the bytes in use and the limit


def body_budget(limits: RequestLimits) -> "ByteBudget":
    return ByteBudget(
        max(limits.max_buffered_bytes, limits.max_body_bytes), partial(_too_many_bodies, limits.retry_after)
    )


def answer_budget(limits: RequestLimits) -> "ByteBudget":
    """The budget of answers. The first 64 KiB of each do not count: the limit of requests in flight bounds those."""
    most = max(limits.max_unread_bytes, limits.max_answer_bytes)
    return ByteBudget(most, partial(_too_many_answers, limits.retry_after), free=SMALL_ANSWER)


class ByteBudget:
    """Counts the bytes of all bodies, or of all answers, up to a limit."""

    def __init__(self, limit: int, refusal: Refusal, free: int = 0) -> None:
        """`limit` is in bytes. The first `free` bytes of each body or answer are not counted."""
        self._limit = limit
        self._refusal = refusal
        self.free = free
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
        """Returns the count of a new body or answer, which starts at 0."""
        return HeldBytes(self)

    def take(self, count: int, *, may_pass: bool = False) -> None:
        """Counts bytes. Raises APIError 429 if all together would pass the limit, unless `may_pass` is true."""
        if self.used + count > self._limit and not may_pass:
            raise self._refusal(self.used, self._limit)
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
    """The bytes of one body or answer within the budget."""

    __slots__ = ("_buffers", "_count", "_free")

    def __init__(self, buffers: ByteBudget) -> None:
        self._buffers = buffers
        self._free = buffers.free  # bytes that may still come before any count
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

    def add_made(self, count: int) -> None:
        """Adds bytes of an answer that is being made. Raises APIError 429 if the budget is spent; the only large answer
        may pass it."""
        if self._free:
            spared = min(self._free, count)
            self._free -= spared
            count -= spared
        if count:
            self._buffers.take(count, may_pass=self._buffers.used == self._count)
            self._count += count

    def become(self, count: int) -> None:
        """Replaces what was counted so far by an answer of `count` bytes. Raises as `add_made`."""
        more = max(count - self._buffers.free, 0) - self._count
        self._free = 0
        if more < 0:
            self._buffers.give(-more)
            self._count += more
        else:
            self.add_made(more)

    def release(self) -> None:
        """Gives all bytes back. The body or answer is no longer needed."""
        self._free = self._buffers.free
        if self._count:
            self._buffers.give(self._count)
            self._count = 0


def _too_many_bodies(retry_after: int, used: int, limit: int) -> APIError:
    return APIError(
        429,
        f"the server holds {used} bytes of requests that are not complete; the limit is {limit} in total: try again "
        "later",
        code="too_many_bodies",
        retry_after=retry_after,
        close=True,
    )


def _too_many_answers(retry_after: int, used: int, limit: int) -> APIError:
    return APIError(
        429,
        f"the server holds {used} bytes of large answers that are being made, or that clients have not read; the limit "
        f"is {limit} in total: read answers sooner, or try again later",
        code="too_many_unread",
        retry_after=retry_after,
    )


def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim, or None where the C library is another one."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
