"""Work that would take the event loop more than its turn."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_INLINE = 8192  # characters to tokenise, or bytes of logprobs to spell out: about 2 ms of either


async def in_turn(work: Callable[[], T], size: int) -> T:
    """The result of `work`: made here where it is short, else in a thread, so that no stream waits for it.

    `size` counts what it goes through: characters, token ids or bytes.
    """
    return work() if size <= _INLINE else await asyncio.to_thread(work)
