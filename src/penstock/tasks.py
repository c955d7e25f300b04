"""Tasks that run beside the requests."""

import asyncio
from collections.abc import Coroutine


def spawn(tasks: set[asyncio.Task[None]], work: Coroutine[None, None, None]) -> None:
    """Starts a task, which `tasks` holds until it ends: the event loop alone would not keep it."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
