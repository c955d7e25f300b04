"""Measures engines that take turns on the same processors (docs/many-models.md).

Two engines of SmolLM2 are saturated at the same time: with the step lease, with half of the threads each, and with all
threads each but no lease. One engine without a lease does the same work, one engine's batch after the other's. The
four take turns in each round. Then: the shares of engines with weights, the time from the end of a killed holder until
another one goes on, and the cost of a turn while one engine runs.

    python benchmarks/step_lease.py --json benchmarks/results/amx/step_lease.json
"""

import asyncio
import contextlib
import math
import os
import random
import subprocess
import sys
import tempfile
import time
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

STREAMS, PROMPT, TOKENS = 16, 32, 96
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


async def batch(client: StreamingClient, most: int) -> list[float]:
    """Runs a full batch. Returns the times at which a token came."""
    source, times = random.Random(1), []

    async def stream(number: int) -> None:
        sampling = SamplingParams(seed=1, max_tokens=most, temperature=0.0, ignore_eos=True)
        prompt = random_prompt(PROMPT, client.info.vocab_size, source)
        request = GenerateRequest(request_id=f"{time.monotonic()}-{number}", prompt_ids=prompt, sampling=sampling)
        async with contextlib.aclosing(client.generate(request)) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                times.extend([time.perf_counter()] * len(delta.token_ids))

    await asyncio.gather(*map(stream, range(STREAMS)))
    return times


async def throughput(rounds: int, cores: int, folder: Path) -> dict[str, Any]:
    """Tokens a second of each arrangement, and their ratios to one engine in the same round."""
    segment = new_segment(folder, "pair")
    pairs = {
        "lease": [await start(cores, segment, place) for place in (0, 1)],
        "halves": [await start(max(cores // 2, 1), None) for _ in (0, 1)],
        "no lease": [await start(cores, None) for _ in (0, 1)],
    }
    one = await start(cores, None)
    rates: dict[str, list[float]] = {name: [] for name in ("one", *pairs)}
    try:
        for turn in range(rounds + 1):
            for name, clients in (("one", None), *pairs.items()):
                began = time.perf_counter()
                if clients is None:
                    for _ in (0, 1):
                        await batch(one, TOKENS)
                else:
                    await asyncio.gather(*(batch(client, TOKENS) for client in clients))
                if turn:  # the first round warms up
                    rates[name].append(2 * STREAMS * TOKENS / (time.perf_counter() - began))
    finally:
        for client in (one, *(client for pair in pairs.values() for client in pair)):
            await client.close()
    found: dict[str, Any] = {}
    for name, values in rates.items():
        ratios = sorted(value / alone for value, alone in zip(values, rates["one"], strict=True))
        found[name] = {"tokens_per_second": median(values), "ratio": median(ratios), "spread": [ratios[0], ratios[-1]]}
    return found


async def shares(cores: int, folder: Path) -> dict[str, Any]:
    """The share of the second engine, by the tokens that both got within the same time."""
    segment = new_segment(folder, "shares")
    clients = [await start(cores, segment, place, weight) for place, weight in enumerate(WEIGHTS)]
    try:
        for client in clients:
            await batch(client, 4)
        running = [asyncio.create_task(batch(client, 1900)) for client in clients]
        await asyncio.sleep(1.0)
        before = [client.stats().decode_tokens for client in clients]
        await asyncio.sleep(SHARE_SECONDS)
        after = [client.stats().decode_tokens for client in clients]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        for client in clients:
            await client.close()
    gained = [now - then for now, then in zip(after, before, strict=True)]
    return {"share": gained[1] / sum(gained), "by weight": WEIGHTS[1] / sum(WEIGHTS)}


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
