"""Tasks that run beside the requests, the count of requests, and blocks that a time ends."""

import asyncio
from collections.abc import Coroutine


def spawn(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    """Starts a task, which `tasks` holds until it ends: the event loop alone would not keep it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


class InFlight:
    """Counts requests, each as long as a `with` block runs."""

    def __init__(self) -> None:
        self.requests = 0
        self._none: asyncio.Event | None = None  # set when the count is 0, if someone waits for that

    def __enter__(self) -> None:
        self.requests += 1

    def __exit__(self, *_: object) -> None:
        self.requests -= 1
        if self._none is not None and not self.requests:
            self._none.set()
            self._none = None

    async def unused(self) -> None:
        """Returns when no request is in flight."""
        if self.requests:
            self._none = self._none or asyncio.Event()
            await self._none.wait()


class TimeLimit:
    """Cancels a block after so many seconds, which then raises TimeoutError. As asyncio.timeout, in a third of its
    time: a request has several."""

    __slots__ = ("_before", "_ended", "_seconds", "_task", "_timer")
    error: type[Exception] = TimeoutError

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ended = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("the block must run in an asyncio task")
        self._task, self._before = task, task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self.over)

    def over(self) -> None:
        """Called when the time is over."""
        self.end()

    def end(self) -> None:
        """Cancels the block, which raises `error`."""
        self._ended = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._ended and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise self.error from None
