"""Measures a server with many language models (docs/many-models.md).

room: ten models and room for four; clients request models at random.
faults: a stream of SmolLM2 beside another model that answers requests, and whose engine is killed, stopped, or loaded
again with other settings: the gaps between its tokens, compared with those of the same round without a fault.

    python benchmarks/many_served.py --json benchmarks/results/amx/many_served.json
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from calm import Watch
from results import parser, write

from penstock.bench.workload import percentile

STAY, CLIENTS, REQUESTS = 4.0, 6, 60
TOKENS, PORT = 300, 8730
KINDS = ("beside", "killed", "stopped", "reloading")


@contextlib.contextmanager
def server(folder: Path, root: Path, *flags: str) -> Iterator[tuple[str, int]]:
    """The URL and the process of a server with a repository."""
    command = [sys.executable, "-m", "penstock", "serve", "--repository", str(root), "--port", str(PORT)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--state-dir", "none", *flags], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{PORT}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/readyz").status_code == 200:
                    break
            if process.poll() is not None:
                sys.exit((folder / "log").read_text())
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def repository(folder: Path, models: int, settings: str) -> Path:
    """A repository of models that have the same settings."""
    root = folder / f"models-{models}"
    for number in range(models):
        (root / f"model-{number}").mkdir(parents=True, exist_ok=True)
        (root / f"model-{number}" / "model.yaml").write_text(settings)
    return root


def engines(server_pid: int) -> set[int]:
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    return {int(pid) for pid in children}


async def room(folder: Path) -> dict[str, Any]:
    """Ten models in room for four: what requests wait, and how many engines are started."""
    waits, statuses, started = list[float](), list[int](), set[int]()
    source = random.Random(3)
    settings = "model: python-8m\nsettings: {max-num-seqs: 8, kv-cache-memory: 64MiB, max-model-len: 512}\n"
    with server(folder, repository(folder, 10, settings), "--max-loaded", "4", "--min-stay", str(STAY)) as (url, pid):
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:

            async def client() -> None:
                for _ in range(REQUESTS // CLIENTS):
                    began = time.monotonic()
                    body = {"model": f"model-{source.randrange(10)}", "prompt": "x =", "max_tokens": 8}
                    statuses.append((await http.post("/v1/completions", json=body)).status_code)
                    waits.append(time.monotonic() - began)
                    started.update(engines(pid))

            began = time.monotonic()
            await asyncio.gather(*(client() for _ in range(CLIENTS)))
            seconds = time.monotonic() - began
            # A request that does not wait: the answer states how long it would have to.
            bodies = [{"model": f"model-{number}", "prompt": "x =", "max_tokens": 8} for number in range(10)]
            soon = {"X-Request-Timeout": "0.05"}
            answers = [await http.post("/v1/completions", json=body, headers=soon) for body in bodies]
    refused = [answer for answer in answers if answer.status_code == 503]
    return {
        "requests": len(statuses),
        "answered": statuses.count(200),
        "wait_p50": median(waits),
        "wait_max": max(waits),
        "engines": len(started),
        "bound": 4 * (1 + seconds / STAY),  # engines that --min-stay allows
        "seconds": seconds,
        "refused_at_once": len(refused),
        "with_retry_after": sum("retry-after" in answer.headers for answer in refused),
    }


class Faults:
    """A stream of model-0, and requests to model-1, one at a time."""

    def __init__(self, http: httpx.AsyncClient, folder: Path, own: int, server_pid: int) -> None:
        """`own` is the process of model-0's engine."""
        self._http, self._folder, self._own, self._server = http, folder, own, server_pid
        self.statuses: list[int] = []
        self.reloads: list[float] = []  # seconds

    async def round(self, kind: str) -> list[float]:
        """Milliseconds between the tokens of streams, one after the other until model-1 answers again."""
        beside = asyncio.create_task(self._requests())
        fault = asyncio.create_task(self._fault(kind))
        gaps = await self._gaps()
        while not fault.done():
            gaps += await self._gaps()
        await fault
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        return gaps

    async def _requests(self) -> None:
        body = {"model": "model-1", "prompt": "The sea", "max_tokens": 64, "ignore_eos": True}
        while True:
            self.statuses.append((await self._http.post("/v1/completions", json=body)).status_code)

    async def _fault(self, kind: str) -> None:
        await asyncio.sleep(1.0)
        if kind in ("killed", "stopped"):
            (other,) = engines(self._server) - {self._own}
            os.kill(other, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind == "stopped":
                await asyncio.sleep(3.0)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGCONT)
            body = {"model": "model-1", "prompt": "The sea", "max_tokens": 1}
            self.statuses.append((await self._http.post("/v1/completions", json=body)).status_code)
        elif kind == "reloading":
            file = self._folder / "models-2" / "model-1" / "model.yaml"
            text = file.read_text()
            sizes = ("max-num-seqs: 8", "max-num-seqs: 7")
            file.write_text(text.replace(*(sizes if sizes[0] in text else reversed(sizes))))
            began = time.monotonic()
            answer = await self._http.post("/v2/repository/models/model-1/load", json={})
            assert answer.status_code == 200, answer.text
            self.reloads.append(time.monotonic() - began)

    async def _gaps(self) -> list[float]:
        body = {"model": "model-0", "prompt": "The sea", "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
        found, last, tokens = list[float](), 0.0, 0
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            self.statuses.append(answer.status_code)
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    if last:
                        found.append(1e3 * (now - last))
                    last, tokens = now, tokens + 1
                elif line == "data: [DONE]":
                    return found
        raise AssertionError("the stream has no end")


async def faults(folder: Path, rounds: int) -> dict[str, Any]:
    """P99 of the gaps of each kind of round, and their ratios to those of the same round without a fault."""
    sizes = "max-num-seqs: 8, kv-cache-memory: 64MiB, max-model-len: 1024"
    settings = f"model: smollm2-135m\nsettings: {{{sizes}, speculation: 'off'}}\n"
    found: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with server(folder, repository(folder, 2, settings), "--load-model", "model-0") as (url, pid):
        (own,) = engines(pid)
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            assert (await http.post("/v2/repository/models/model-1/load", json={})).status_code == 200
            run = Faults(http, folder, own, pid)
            await run.round("beside")
            for number in range(rounds):
                for kind in KINDS if number % 2 == 0 else reversed(KINDS):
                    while len(engines(pid)) != 2:  # the engine before a reload
                        await asyncio.sleep(0.1)
                    found[kind].append(await run.round(kind))
    result: dict[str, Any] = {"requests": len(run.statuses), "failed": sum(each != 200 for each in run.statuses)}
    result["reload_s"] = median(run.reloads)
    base = percentile(list(chain(*found["beside"])), 0.99)
    for kind, each in found.items():
        p99 = [percentile(gaps, 0.99) for gaps in each]
        ratios = [now / percentile(before, 0.99) for now, before in zip(p99, found["beside"], strict=True)]
        result[kind] = {
            "p50_ms": median(median(gaps) for gaps in each),
            "p99_ms": median(p99),
            "max_ms": max(max(gaps) for gaps in each),
            "p99_ratio": median(ratios),
            "p99_ratio_of_all": percentile(list(chain(*each)), 0.99) / base,
            "ratios": sorted(ratios),
        }
    return result


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--only", choices=("room", "faults"))
    given.add_argument("--rounds", type=int, default=3)
    options = given.parse_args()
    found: dict[str, Any] = {}
    watch, began = Watch(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in (None, "room"):
            found["room"] = asyncio.run(room(folder))
        if options.only in (None, "faults"):
            found["faults"] = asyncio.run(faults(folder, options.rounds))
    write({**found, "calm_share": watch.share(began, time.perf_counter())}, options.json)


if __name__ == "__main__":
    main()
