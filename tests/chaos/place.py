"""A server under test: its processes, what it holds, and whether all is given back."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from penstock.weights.packaged import EMBEDDED
from tests.chaos.engine import FIRED
from tests.chaos.server import PROBE, samples
from tests.e2e.server import Server, gauge, serving
from tests.engine.processes import children, command_line

FLAGS = ("--max-num-seqs", "64", "--kv-cache-memory", "64MiB")
BACK_SECONDS = 2.0  # in which blocks, files and tasks must be back to start
LOOK_SECONDS = 0.1  # between looks at what is held
SETTLE_SECONDS = 20.0  # for requests to end on a busy machine, before these seconds begin
_ENGINES = ("tests.chaos.engine", "penstock.engine.process", "penstock.engine.replacement")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Failed(Exception):
    """An experiment did not pass."""


def require(condition: object, message: str) -> None:
    """Raises Failed with the message unless the condition holds."""
    if not condition:
        raise Failed(message)


@dataclass(frozen=True)
class Held:
    """What a server holds."""

    running: float  # requests in the engine
    waiting: float
    in_flight: float  # HTTP requests
    blocks: float  # share of KV blocks that requests hold
    files: int  # open in the server and its engine
    tasks: int


class Place:
    """A running server and a session of clients."""

    def __init__(self, server: Server, http: aiohttp.ClientSession, probe: Path) -> None:
        self.server = server
        self.url = server.url
        self.http = http
        self.probe = probe
        self.model = ""

    @property
    def engine_pid(self) -> int:
        """The engine's process. The server may have another child, which checks grammars."""
        for child in children(self.server.process.pid):
            if any(engine in command_line(child) for engine in _ENGINES):
                return child
        raise Failed("the server has no engine")

    def resident(self, *, engine: bool = True) -> int:
        """Bytes of private memory of the server and, unless `engine` is false, of its children."""
        pids = [self.server.process.pid, *(children(self.server.process.pid) if engine else [])]
        pages = 0
        for pid in pids:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/statm").read_text().split()
                pages += int(fields[1]) - int(fields[2])
        return pages * _PAGE

    def files(self) -> int:
        """Open files of the server and the engine."""
        count = 0
        for pid in (self.server.process.pid, self.engine_pid):
            count += len(os.listdir(f"/proc/{pid}/fd"))
        return count

    async def metrics(self) -> str:
        async with self.http.get(self.url + "/metrics") as answer:
            return await answer.text()

    async def value(self, name: str) -> float:
        return gauge(await self.metrics(), name)

    async def held(self) -> Held:
        """What the server holds now; tasks as of the last second, without the measurement's own."""
        text = await self.metrics()
        found = samples(self.probe)
        return Held(
            gauge(text, "penstock_num_requests_running"),
            gauge(text, "penstock_num_requests_waiting"),
            gauge(text, "penstock_http_requests_in_flight"),
            gauge(text, "penstock_kv_cache_usage_perc"),
            self.files(),
            found[-1].tasks if found else 0,
        )

    async def baseline(self) -> Held:
        """What the server holds when nothing is sent: the reference for `require_baseline`."""
        await self.idle()
        await asyncio.sleep(1.2)
        return await self.held()

    async def idle(self, seconds: float = SETTLE_SECONDS) -> None:
        """Returns when the engine has no request."""
        end = time.monotonic() + seconds
        while True:
            text = await self.metrics()
            if not gauge(text, "penstock_num_requests_running") + gauge(text, "penstock_num_requests_waiting"):
                return
            require(time.monotonic() < end, f"requests are still running {seconds:g} s later")
            await asyncio.sleep(0.05)

    async def require_baseline(self, before: Held) -> dict[str, Any]:
        """Requires that blocks, files and tasks are back to `before` within 2 s after the last request has ended.

        Returns the seconds since the call, in which the last requests end."""
        called = time.monotonic()
        await self.idle()
        # Looks are counted, as each takes longer on a busy machine. The probe reports once a second.
        for _ in range(round((BACK_SECONDS + 1.0) / LOOK_SECONDS)):
            now = await self.held()
            # The grammar checker and worker threads are started when first needed.
            back = now.blocks == before.blocks and now.files <= before.files + 4 and now.tasks <= before.tasks + 8
            if back and now.in_flight <= 1:
                return {"given_back_s": round(time.monotonic() - called, 2)}
            await asyncio.sleep(LOOK_SECONDS)
        raise Failed(f"not back to start: {now}, before {before}")

    async def until_ready(self, wanted: bool = True, seconds: float = 60.0) -> float:
        """Returns after how many seconds /readyz answers so."""
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            with contextlib.suppress(aiohttp.ClientError):
                async with self.http.get(self.url + "/readyz") as answer:
                    if (answer.status == 200) == wanted:
                        return time.monotonic() - began
            await asyncio.sleep(0.02)
        raise Failed(f"the server was not {'ready' if wanted else 'restarting'} within {seconds:g} s")

    def lags(self, since: float) -> dict[str, Any]:
        """The event loop's lag since a moment (monotonic seconds)."""
        chosen = [sample for sample in samples(self.probe) if sample.time >= since]
        ticks = sum(sample.ticks for sample in chosen)
        lags = sorted((lag for sample in chosen for lag in sample.lags), reverse=True)
        place = ticks // 100
        return {
            "lag_p99_ms": round(1000 * lags[place], 2) if place < len(lags) else 1.0,
            "lag_worst_ms": round(1000 * lags[0], 1) if lags else 1.0,
        }


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables for processes that are started within the block."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.asynccontextmanager
async def place(
    folder: Path, *flags: str, model: str = EMBEDDED, wrapper: tuple[str, ...] = (), **variables: str
) -> AsyncIterator[Place]:
    """A server of the embedded model, whose engine has faults on request. It must end well."""
    folder.mkdir(parents=True, exist_ok=True)
    fired = folder / "fired"
    fired.mkdir(exist_ok=True)
    probe = folder / "probe"
    probe.touch()
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    with contextlib.ExitStack() as held:
        with environment(**{FIRED: str(fired), PROBE: str(probe), "PYTHONPATH": path, **variables}):
            command = (*wrapper, sys.executable, "-m", "tests.chaos.server", "serve")
            server = await asyncio.to_thread(
                held.enter_context, serving(folder / "log", *FLAGS, *flags, model=model, command=command)
            )
        timeout = aiohttp.ClientTimeout(total=300)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # kept connections are no leak
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            made = Place(server, http, probe)
            async with http.get(made.url + "/v1/models") as answer:
                made.model = (await answer.json())["data"][0]["id"]
            yield made
        await asyncio.to_thread(held.close)
