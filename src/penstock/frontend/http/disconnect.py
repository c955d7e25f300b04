"""Notices that a client disconnects while its answer is being made."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.frontend.errors import ClientGone
from penstock.frontend.http.asgi import Receive

_LOOK_SECONDS = 0.02  # after which a client may be noticed that has gone: most one-shot models answer sooner


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block if the client disconnects, and raises ClientGone then. The body must have been read.

    Generators that the cancelled block closes abort their requests.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("while_connected must run in an asyncio task")
    gone = False

    def cancel(watch: asyncio.Task[None]) -> None:
        nonlocal gone
        if not watch.cancelled():
            gone = True
            task.cancel()

    watch: asyncio.Task[None] | None = None

    def begin() -> None:
        nonlocal watch
        watch = asyncio.create_task(_disconnect(receive))
        watch.add_done_callback(cancel)

    timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, begin)
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        timer.cancel()
        if watch is not None:
            watch.remove_done_callback(cancel)
            watch.cancel()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
