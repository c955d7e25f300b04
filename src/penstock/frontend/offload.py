"""Keeps long work off the event loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_INLINE = 8192  # characters to tokenise, or bytes of logprobs to format: about 2 ms of work


async def offload_if_large(work: Callable[[], T], size: int) -> T:
    """Returns the result of `work`. Work longer than about 2 ms runs in a thread, so that streams are not delayed.

    `size` is the amount of work: the number of characters, token ids or bytes that it processes.
    """
    return work() if size <= _INLINE else await asyncio.to_thread(work)
