"""`penstock serve` with an engine that has faults: python -m tests.chaos.server serve MODEL …

It also measures itself: it writes a line of figures each second to the file that CHAOS_PROBE names. A text
with TOKENIZER_FAULT makes the tokenizer fail as its native code does.
"""

import asyncio
import gc
import os
import time
from pathlib import Path
from typing import Any

import msgspec

import penstock.frontend
from penstock.cli.main import main as command
from penstock.engine.link.engine_child import EngineChild
from penstock.text import Tokenizer
from tests.chaos.engine import COMMAND

PROBE = "CHAOS_PROBE"  # environment variable
TOKENIZER_FAULT = "\N{SKULL AND CROSSBONES} the tokenizer panics"
TICK = 0.001
LEAST = 0.001  # seconds; shorter lags are not recorded


class PanicException(BaseException):
    """As PyO3 raises for a panic in Rust: no Exception."""


class Sample(msgspec.Struct, frozen=True):
    """The event loop in the last second, and what it holds."""

    time: float  # monotonic
    tasks: int
    ticks: int
    lags: list[float]  # seconds, of ticks later than LEAST
    objects: int  # that the garbage collector tracks


async def probe(path: Path) -> None:
    """Measures how late the event loop runs what is due.

    Only time that this process computed counts, since other programs may have the processor: a lag is at most the
    processor time of all threads since the last tick. A thread that holds the interpreter is so part of the lag.
    """
    with path.open("ab", buffering=0) as file:
        while True:
            lags, ticks, end = [], 0, time.monotonic() + 1.0
            while time.monotonic() < end:
                due, used = time.monotonic() + TICK, time.process_time()
                await asyncio.sleep(TICK)
                lag = min(time.monotonic() - due, time.process_time() - used)
                ticks += 1
                if lag > LEAST:
                    lags.append(lag)
            objects = sum(gc.get_count())
            file.write(msgspec.json.encode(Sample(end, len(asyncio.all_tasks()), ticks, lags, objects)) + b"\n")


def samples(path: Path) -> list[Sample]:
    return [msgspec.json.decode(line, type=Sample) for line in path.read_bytes().splitlines()]


def _probed() -> None:
    serve = penstock.frontend.serve

    async def serve_and_measure(*args: Any, **named: Any) -> None:
        measuring = asyncio.create_task(probe(Path(os.environ[PROBE])))
        try:
            await serve(*args, **named)
        finally:
            measuring.cancel()

    penstock.frontend.serve = serve_and_measure  # type: ignore[assignment]


class _Panicking:
    """A tokenizer of the native library that panics at some texts."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[Any], **named: Any) -> Any:
        if any(TOKENIZER_FAULT in text for text in texts):
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return self._backend.encode_batch_fast(texts, **named)


def _panicking() -> None:
    load = Tokenizer.load

    def load_panicking(*args: Any) -> Tokenizer:
        loaded = load(*args)
        loaded._backend = _Panicking(loaded._backend)  # type: ignore[assignment]
        return loaded

    Tokenizer.load = load_panicking  # type: ignore[method-assign]


if __name__ == "__main__":
    if PROBE in os.environ:
        _probed()
    _panicking()
    with EngineChild(COMMAND) as engine:
        command(engine)
