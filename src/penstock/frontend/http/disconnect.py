"""Notices that a client disconnects while its answer is being made."""

import asyncio

from penstock.frontend.errors import ClientGone
from penstock.frontend.http.asgi import Receive
from penstock.tasks import TimeLimit

_LOOK_SECONDS = 0.02  # after which a client may be noticed that has gone: most one-shot models answer sooner


class WhileConnected(TimeLimit):
    """Cancels the block if the client disconnects, and raises ClientGone then. The body must have been read.

    Generators that the cancelled block closes abort their requests.
    """

    __slots__ = ("_receive", "_watch")
    error = ClientGone

    def __init__(self, receive: Receive) -> None:
        super().__init__(_LOOK_SECONDS)
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None

    def over(self) -> None:
        self._watch = asyncio.create_task(self._disconnect())
        self._watch.add_done_callback(self._gone)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
        super().__exit__(kind)

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _gone(self, watch: asyncio.Task[None]) -> None:
        if self._watch is watch:  # else the block is over
            self.end()
