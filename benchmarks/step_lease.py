"""Measures engines that take turns on the same processors (docs/many-models.md).

Two engines of SmolLM2 are saturated at the same time: with the step lease, with half of the threads each, and with all
threads each but no lease. They are compared with one engine that has all threads. The four arrangements take turns.
Then: the shares of engines with weights, the time from the end of a killed holder until another one goes on, and the
cost of a turn while one engine runs.

    python benchmarks/step_lease.py --json benchmarks/results/amx/step_lease.json
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from results import parser, write

from penstock.bench.workload import percentile, random_prompt
from penstock.config import EngineConfig
from penstock.config.engine import LEASE_BYTES, LeasePlace
from penstock.engine.client import StreamingClient
from penstock.engine.link.ipc import spawn
from penstock.kernels.native.loader import LIBRARY
from penstock.messages import GenerateRequest, SamplingParams
from penstock.runtime.step_lease import SharedProcessors
from penstock.weights.packaged import SMOLLM2

STREAMS, PROMPT = 16, 32
SECONDS = 2.5  # of a measurement
SHARE_SECONDS = 8.0
WEIGHTS = (1.0, 3.0)
KILLS, TURNS = 100, 100_000
HOLDER = Path(__file__).parents[1] / "tests" / "engine" / "lease_holder.py"


def new_segment(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_bytes(bytes(LEASE_BYTES))
    return path


async def start(threads: int, segment: Path | None, place: int = 0, weight: float = 1.0) -> StreamingClient:
    lease = None if segment is None else LeasePlace(path=str(segment), place=place, weight=weight)
    return await spawn(
        EngineConfig(
            model=str(SMOLLM2.locate()),
            name="bench",
            max_model_len=2048,
            max_num_seqs=STREAMS,
            kv_cache_bytes=128 << 20,
            enable_prefix_caching=False,
            threads=threads,
            lease=lease,
        )
    )


class Streams:
    """A full batch that decodes until the block ends."""

    def __init__(self, clients: Sequence[StreamingClient]) -> None:
        self._clients, self._tasks = clients, list[asyncio.Task[None]]()

    async def __aenter__(self) -> "Streams":
        """Returns when all prompts are computed."""
        before = [client.stats().decode_tokens for client in self._clients]
        for client in self._clients:
            source = random.Random(1)
            for number in range(STREAMS):
                prompt = random_prompt(PROMPT, client.info.vocab_size, source)
                sampling = SamplingParams(seed=1, max_tokens=1900, temperature=0.0, ignore_eos=True)
                name = f"{time.monotonic()}-{number}"
                request = GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling)
                self._tasks.append(asyncio.create_task(self._read(client, request)))
        while any(
            client.stats().running < STREAMS or client.stats().decode_tokens < then + 2 * STREAMS
            for client, then in zip(self._clients, before, strict=True)
        ):
            await asyncio.sleep(0.02)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not all(client.idle for client in self._clients):
            await asyncio.sleep(0.02)

    async def rate(self, seconds: float) -> list[float]:
        """Tokens a second of each engine."""
        before, began = [client.stats().decode_tokens for client in self._clients], time.perf_counter()
        await asyncio.sleep(seconds)
        passed = time.perf_counter() - began
        return [(each.stats().decode_tokens - then) / passed for each, then in zip(self._clients, before, strict=True)]

    async def _read(self, client: StreamingClient, request: GenerateRequest) -> None:
        async with contextlib.aclosing(client.generate(request)) as deltas:  # type: ignore[type-var]
            async for _ in deltas:
                pass


async def throughput(rounds: int, cores: int, folder: Path) -> dict[str, Any]:
    """Tokens a second of each arrangement, both engines together, and their ratios to one engine in the same round."""
    segment = new_segment(folder, "pair")
    arrangements = {
        "one": [await start(cores, None)],
        "lease": [await start(cores, segment, place) for place in (0, 1)],
        "halves": [await start(max(cores // 2, 1), None) for _ in (0, 1)],
        "no lease": [await start(cores, None) for _ in (0, 1)],
    }
    rates: dict[str, list[float]] = {name: [] for name in arrangements}
    try:
        for turn in range(rounds + 1):
            for name, clients in arrangements.items():
                async with Streams(clients) as streams:
                    rate = sum(await streams.rate(SECONDS))
                if turn:  # the first round warms up
                    rates[name].append(rate)
    finally:
        for client in itertools.chain(*arrangements.values()):
            await client.close()
    found: dict[str, Any] = {}
    for name, values in rates.items():
        ratios = sorted(value / alone for value, alone in zip(values, rates["one"], strict=True))
        found[name] = {"tokens_per_second": median(values), "ratio": median(ratios), "spread": [ratios[0], ratios[-1]]}
    return found


def held(segment: Path) -> list[float]:
    """Seconds for which each engine has computed. See native/cpp/lease.h."""
    data = segment.read_bytes()
    return [
        int.from_bytes(data[64 * (place + 1) + 16 :][:8], "little", signed=True) / 1e9 * weight
        for place, weight in enumerate(WEIGHTS)
    ]


async def shares(cores: int, folder: Path) -> dict[str, Any]:
    """The share of the second engine in the time of steps, and in the tokens."""
    segment = new_segment(folder, "shares")
    clients = [await start(cores, segment, place, weight) for place, weight in enumerate(WEIGHTS)]
    try:
        async with Streams(clients) as streams:
            before = held(segment)
            rates = await streams.rate(SHARE_SECONDS)
            seconds = [now - then for now, then in zip(held(segment), before, strict=True)]
    finally:
        for client in clients:
            await client.close()
    return {
        "time": seconds[1] / sum(seconds),
        "tokens": rates[1] / sum(rates),
        "by weight": WEIGHTS[1] / sum(WEIGHTS),
    }


def kills(folder: Path) -> dict[str, float]:
    """Milliseconds from the kill of the process that holds the lease until another one has it."""
    segment = new_segment(folder, "kills")
    own, waits = SharedProcessors(LeasePlace(path=str(segment), place=0)), []
    for _ in range(KILLS):
        command = [sys.executable, "-I", "-S", str(HOLDER), str(LIBRARY), str(segment), "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            holder.kill()
            began = time.perf_counter()
            own.take(math.inf)
            waits.append(1e3 * (time.perf_counter() - began))
            own.give()
    return {"median": median(waits), "p99": percentile(waits, 0.99), "max": max(waits)}


def turn_cost(folder: Path) -> float:
    """Microseconds of a turn while no other engine runs."""
    own = SharedProcessors(LeasePlace(path=str(new_segment(folder, "alone")), place=0))
    began = time.perf_counter()
    for _ in range(TURNS):
        own.take(math.inf)
    return 1e6 * (time.perf_counter() - began) / TURNS


def main() -> None:
    given = parser(__doc__)
    given.add_argument("--rounds", type=int, default=5)
    options = given.parse_args()
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {
            "turn_us": turn_cost(folder),
            "kills_ms": kills(folder),
            "shares": asyncio.run(shares(cores, folder)),
            "throughput": asyncio.run(throughput(options.rounds, cores, folder)),
        }
    write(found, options.json)


if __name__ == "__main__":
    main()
