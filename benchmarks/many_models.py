"""Measures language models that share one machine (docs/many-models.md).

peaks: three engines of SmolLM2, one after the other with many requests, while the two others have few. Their KV caches
have one budget, or fixed thirds of it. Both arrangements take turns.
room: a server with ten models and room for four, whose clients ask for models at random.
faults: a stream beside a model whose engine is killed, stopped, or reloaded; the gaps between its tokens, and without.

    python benchmarks/many_models.py --json benchmarks/results/amx/many_models.json
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
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from results import parser, write

from penstock.bench.workload import percentile, random_prompt
from penstock.cli.serving.kv_budgets import KVBudgets
from penstock.config import EngineConfig
from penstock.config.engine import LEASE_BYTES, LeasePlace
from penstock.engine.client import StreamingClient
from penstock.engine.link.ipc import spawn
from penstock.messages import GenerateRequest, SamplingParams
from penstock.weights.packaged import SMOLLM2

MODELS, MANY, FEW = 3, 20, 2
PROMPT, OUTPUT = 160, 48
SHARE = 48 << 20  # bytes of a KV cache: about 2,000 tokens
FIRST_TOKEN = 3.0  # seconds: a later first token does not count as good
STAY, CLIENTS, REQUESTS = 4.0, 6, 60


async def start(place: int, segment: Path, *, elastic: bool) -> tuple[StreamingClient, EngineConfig]:
    config = EngineConfig(
        model=str(SMOLLM2.locate()),
        name=f"model-{place}",
        max_model_len=512,
        max_num_seqs=MANY,
        kv_cache_bytes=SHARE,
        kv_reserve_bytes=MODELS * SHARE if elastic else None,
        enable_prefix_caching=False,
        lease=LeasePlace(path=str(segment), place=place),
    )
    return await spawn(config), config


async def peaks(folder: Path, *, elastic: bool) -> dict[str, float]:
    """TTFT, goodput and preemptions while each model has its peak in turn."""
    segment = folder / f"lease-{elastic}"
    segment.write_bytes(bytes(LEASE_BYTES))
    started = [await start(place, segment, elastic=elastic) for place in range(MODELS)]
    budgets, firsts, good = KVBudgets(), list[float](), 0
    for client, config in started:
        budgets.add(client, config)
    following = asyncio.create_task(budgets.follow())
    source = random.Random(1)

    async def stream(client: StreamingClient) -> None:
        nonlocal good
        began, first = time.monotonic(), 0.0
        prompt = random_prompt(PROMPT, client.info.vocab_size, source)
        sampling = SamplingParams(seed=1, max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(request_id=f"{began}-{source.random()}", prompt_ids=prompt, sampling=sampling)
        async with contextlib.aclosing(client.generate(request)) as deltas:  # type: ignore[type-var]
            async for _ in deltas:
                first = first or time.monotonic() - began
        firsts.append(first)
        good += OUTPUT if first <= FIRST_TOKEN else 0

    async def load(client: StreamingClient, count: int) -> None:
        """So many clients, which send two requests each."""

        async def twice() -> None:
            for _ in range(2):
                await stream(client)

        await asyncio.gather(*(twice() for _ in range(count)))

    clients = [client for client, _ in started]
    try:
        await asyncio.gather(*map(stream, clients))
        firsts.clear()
        good, began = 0, time.monotonic()
        for peak in clients:
            await asyncio.gather(*(load(client, MANY if client is peak else FEW) for client in clients))
        seconds = time.monotonic() - began
        return {
            "ttft_p50": median(firsts),
            "ttft_p99": percentile(firsts, 0.99),
            "goodput": good / seconds,
            "preemptions": sum(client.stats().preemptions for client in clients),
        }
    finally:
        following.cancel()
        for client in clients:
            await client.close()


@contextlib.contextmanager
def server(folder: Path, models: int, *flags: str) -> Iterator[tuple[str, int]]:
    """The URL and the process of a server with a repository of small models."""
    root = folder / f"models-{models}"
    for number in range(models):
        (root / f"model-{number}").mkdir(parents=True, exist_ok=True)
        settings = "settings: {max-num-seqs: 8, kv-cache-memory: 64MiB, max-model-len: 512}"
        (root / f"model-{number}" / "model.yaml").write_text(f"model: python-8m\n{settings}\n")
    port = 8730
    command = [sys.executable, "-m", "penstock", "serve", "--repository", str(root), "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--state-dir", "none", *flags], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/readyz").status_code == 200:
                    break
            time.sleep(0.1)
        yield url, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def engines(server_pid: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()]


async def room(folder: Path) -> dict[str, Any]:
    """Ten models in room for four: what requests wait, and how many engines are started."""
    waits, statuses, started = list[float](), list[int](), set[int]()
    source = random.Random(3)
    with server(folder, 10, "--max-loaded", "4", "--min-stay", str(STAY)) as (url, pid):
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
    return {
        "requests": len(statuses),
        "answered": statuses.count(200),
        "wait_p50": median(waits),
        "wait_max": max(waits),
        "engines": len(started),
        "bound": 4 * (1 + seconds / STAY),  # engines that --min-stay allows
        "seconds": seconds,
    }


async def gaps(http: httpx.AsyncClient, tokens: int) -> list[float]:
    """Seconds between the events of a stream."""
    body = {"model": "model-0", "prompt": "def f(", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    found, last = list[float](), 0.0
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                now = time.monotonic()
                if last:
                    found.append(now - last)
                last = now
    return found


async def faults(folder: Path) -> dict[str, Any]:
    """Gaps of a stream, in milliseconds, while the other model meets a fault."""
    found: dict[str, Any] = {}
    with server(folder, 2) as (url, pid):
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:

            async def fault(kind: str) -> None:
                body = {"model": "model-1", "prompt": "x =", "max_tokens": 400, "ignore_eos": True}
                request = asyncio.create_task(http.post("/v1/completions", json=body))
                await asyncio.sleep(0.3)
                if kind in ("killed", "stopped"):
                    before = set(engines(pid))
                    other = max(before)  # it was started last, or again
                    os.kill(other, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
                    if kind == "stopped":
                        await asyncio.sleep(1.5)
                        os.kill(other, signal.SIGCONT)
                elif kind == "reloading":
                    text = folder / "models-2" / "model-1" / "model.yaml"
                    text.write_text(text.read_text().replace("max-num-seqs: 8", "max-num-seqs: 4"))
                    await http.post("/v2/repository/models/model-1/load", json={})
                assert (await request).status_code == 200

            await gaps(http, 400)
            for kind in ("alone", "beside", "killed", "stopped", "reloading"):
                work = asyncio.create_task(fault(kind)) if kind != "alone" else None
                each = [1e3 * gap for gap in await gaps(http, 480)]
                if work is not None:
                    await work
                found[kind] = {"p50": median(each), "p99": percentile(each, 0.99), "max": max(each)}
    return found


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--only", choices=("peaks", "room", "faults"))
    given.add_argument("--rounds", type=int, default=2)
    options = given.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in (None, "peaks"):
            for _ in range(options.rounds):
                for kind, elastic in (("budget", True), ("thirds", False)):
                    found.setdefault(kind, []).append(asyncio.run(peaks(folder, elastic=elastic)))
        if options.only in (None, "room"):
            found["room"] = asyncio.run(room(folder))
        if options.only in (None, "faults"):
            found["faults"] = asyncio.run(faults(folder))
    write(found, options.json)


if __name__ == "__main__":
    main()
