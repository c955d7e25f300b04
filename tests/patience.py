"""Waits of tests, with bounds that hold on a busy machine.

Beside ten other programs a test has a part of a processor, and may stand still for seconds. So ticks are counted
instead of seconds: the time in which this process was stopped is left out.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 120.0  # seconds for an answer or an end
AT_ONCE = 30.0  # seconds for what takes milliseconds on an idle machine, and minutes or forever if it is broken


def wait_for(
    condition: Callable[[], T], what: str = "a condition", seconds: float = PATIENCE, *, tick: float = 0.05
) -> T:
    """Blocks until `condition()` is true, and returns its value; looks every `tick` seconds. AssertionError if nothing
    comes for `seconds`."""
    for _ in range(round(seconds / tick)):
        if value := condition():
            return value
        time.sleep(tick)
    raise AssertionError(f"waited {seconds:g} s for {what}")


async def until(
    condition: Callable[[], T], what: str = "a condition", seconds: float = PATIENCE, *, tick: float = 0.005
) -> T:
    """`wait_for`, while the event loop runs."""
    for _ in range(round(seconds / tick)):
        if value := condition():
            return value
        await asyncio.sleep(tick)
    raise AssertionError(f"waited {seconds:g} s for {what}")
