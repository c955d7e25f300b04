"""How long callbacks hold the event loop, on a processor that other tests use as well."""

import asyncio
import asyncio.events
import contextlib
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

LONGEST = 0.02  # seconds that a callback may take
P99 = 0.005  # seconds that 99 of 100 callbacks may take
TRIES = 3  # other work on this machine can slow a try down: the best one counts
USUAL_SECONDS = 0.001  # see slowness

Record = Callable[[str, object], None]


@contextlib.contextmanager
def callbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The processor time in seconds of each callback that the event loop runs: how long it holds the loop, whatever
    else this machine does. Collections of garbage leave out what earlier tests have made: a server has none of it."""
    held: list[float] = []
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        held.append(time.thread_time() - began)

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", timed)
        gc.freeze()  # as a server does when it is ready
        try:
            yield held
        finally:
            gc.unfreeze()


def slowness() -> float:
    """How many times longer Python takes now than it usually did on the machine that the limits were chosen on; at
    least 1. Beside other tests, and on another machine, it can be 3."""

    def seconds() -> float:
        began = time.thread_time()
        len({key for i in range(2000) for key in (b"%d" % i).split(b"1")})
        return time.thread_time() - began

    return max(statistics.median(seconds() for _ in range(21)) / USUAL_SECONDS, 1.0)


def last_of_99(held: list[float]) -> float:
    """The time that 99 of 100 sorted times do not pass."""
    return held[-1 - len(held) // 100]


def report(name: str, held: list[float], record: Record | None = None) -> float:
    """Sorts the times, and shows them; `record` is pytest's `record_property`. Returns the slowness."""
    held.sort()
    longest, p99, slower = 1000 * held[-1], 1000 * last_of_99(held), slowness()
    print(
        f"{name}: {len(held)} callbacks, longest {longest:.1f} ms, P99 {p99:.2f} ms, on a processor {slower:.1f} times "
        "slower than usual"
    )
    if record is not None:
        record("loop_ms_longest", round(longest / slower, 1))
        record("loop_ms_p99", round(p99 / slower, 2))
    return slower


async def assert_loop_stays_free(
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[], Awaitable[None]],
    p99: float = LONGEST,
    record: Record | None = None,
) -> None:
    """Does `act`, several times if need be, and fails if in each a callback takes longer than LONGEST, or one of 100
    longer than `p99` seconds."""
    for _ in range(TRIES):
        with monkeypatch.context() as patched, callbacks(patched) as held:
            await act()
        slower = slowness()
        held.sort()
        if held[-1] < LONGEST * slower and last_of_99(held) < p99 * slower:
            report("best try", held, record)
            return
    raise AssertionError(f"a callback holds the loop for {held[-1]:.3f} s, 1 of 100 for {last_of_99(held):.4f} s")
