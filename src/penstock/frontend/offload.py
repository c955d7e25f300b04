"""Keeps long work off the event loop, or divides it."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_INLINE = 8192  # characters to tokenise, or bytes of logprobs to format: about 2 ms of work
_ITEMS = 512  # such as messages: to read them takes about 1 ms


async def offload_if_large(work: Callable[[], T], size: int) -> T:
    """Returns the result of `work`. Work longer than about 2 ms runs in a thread, so that streams are not delayed.

    `size` is the amount of work: the number of characters, token ids or bytes that it processes.
    """
    return work() if size <= _INLINE else await asyncio.to_thread(work)


async def give_way(done: int) -> None:
    """Lets the event loop do other work after every 512 items that were done. A thread would hold the interpreter, and
    so the loop, for longer."""
    if done % _ITEMS == _ITEMS - 1:
        await asyncio.sleep(0)


class FewAtOnce:
    """Runs at most `most` pieces of work at a time; callers wait for their turn."""

    def __init__(self, most: int) -> None:
        self.waiting = 0  # calls that have not returned
        self._free = asyncio.Semaphore(most)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which runs in a thread. If the caller is cancelled, the thread goes on, and
        counts until it ends."""
        return await self._start(lambda: asyncio.get_running_loop().run_in_executor(None, work))

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `work`. If the caller is cancelled, it goes on, and counts until it ends."""
        return await self._start(lambda: asyncio.ensure_future(work()))

    async def _start(self, start: Callable[[], "asyncio.Future[T]"]) -> T:
        self.waiting += 1
        try:
            await self._free.acquire()
        except BaseException:
            self.waiting -= 1
            raise
        future = start()
        future.add_done_callback(self._ended)
        return await asyncio.shield(future)

    def _ended(self, future: "asyncio.Future[T]") -> None:
        self.waiting -= 1
        self._free.release()
        if not future.cancelled():
            future.exception()  # else asyncio logs that of a caller that was cancelled
