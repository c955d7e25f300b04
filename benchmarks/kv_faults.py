"""Sends thousands of requests to an engine with a disk tier while everything goes wrong, and compares every answer.

Requests continue a few long texts, in a KV cache that holds only some of them, so blocks go to disk and come back all
the time. Meanwhile the engine is killed, files are changed, cut, exchanged and deleted, clients leave, the cache is
reset, and files may suddenly not be larger than half a page (RLIMIT_FSIZE), as on a full disk. Each answer is compared
with that of an engine without the tier. Exits with 1 if a token differs or a block stays held.

    python benchmarks/kv_faults.py --requests 10000 --json benchmarks/results/amx/kv_faults.json
"""

import asyncio
import contextlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from results import parser, write

from penstock.bench.workload import random_prompt
from penstock.config import EngineConfig
from penstock.engine.link.ipc import spawn
from penstock.messages import EndsEngines, EngineClient, EngineError, GenerateRequest, ResetCache, SamplingParams
from penstock.weights.packaged import embedded_model

TEXTS, LENGTH = 40, 440  # texts that requests continue, and their tokens
DIFFERENT = 300  # requests that are compared; each is sent many times
AT_ONCE = 16
LEAVE = 0.1  # share of clients that leave after the first token
KILL_SECONDS = 20.0  # from a start to the next kill: an engine that ends eight times within a minute is given up
FAULT_SECONDS = 0.02  # between two changes of a file
RESET_SECONDS = 7.0
FULL_SECONDS = 3.0  # of a full disk, and between two


class Load:
    """The requests, their right answers, and what happened to them."""

    def __init__(self, vocabulary: int, source: random.Random) -> None:
        texts = [random_prompt(LENGTH, vocabulary, source) for _ in range(TEXTS)]
        self.requests = []
        for i in range(DIFFERENT):
            text = texts[i % TEXTS]
            prompt = text[: source.randrange(LENGTH // 3, LENGTH)] + random_prompt(2, vocabulary, source)
            sampling = SamplingParams(seed=i, max_tokens=6, temperature=0.8, ignore_eos=True)
            self.requests.append(GenerateRequest(request_id="", prompt_ids=prompt, sampling=sampling))
        self.source = source
        self.counts: Counter[str] = Counter()

    async def answer(self, client: EngineClient, index: int, name: str, leave: bool = False) -> tuple[int, ...]:
        tokens: list[int] = []
        stream = client.generate(msgspec.structs.replace(self.requests[index], request_id=name))
        async with contextlib.aclosing(stream):
            async for delta in stream:
                if delta.error:
                    raise EngineError(delta.error)
                tokens[delta.offset :] = delta.token_ids
                self.counts["cached tokens"] += delta.cached_tokens if delta.finish_reason else 0
                if leave and tokens:
                    break
        return tuple(tokens)

    async def run(self, client: EngineClient, count: int, right: Sequence[tuple[int, ...]]) -> None:
        """Send `count` requests, some at a time."""
        numbers = iter(range(count))

        async def one_client() -> None:
            for number in numbers:
                index, leave = self.source.randrange(DIFFERENT), self.source.random() < LEAVE
                try:
                    found = await self.answer(client, index, f"r{number}", leave)
                except EndsEngines:  # two kills have met it
                    self.counts["refused after two kills"] += 1
                    continue
                self.counts["left" if leave else "compared"] += 1
                self.counts["wrong"] += found != right[index][: len(found)] or (not leave and found != right[index])

        await asyncio.gather(*(one_client() for _ in range(AT_ONCE)))


async def kills(client: EngineClient, counts: Counter[str]) -> None:
    while True:
        await asyncio.sleep(KILL_SECONDS)
        os.kill(client.info.pid, signal.SIGKILL)
        counts["kills"] += 1
        before = client.state.restarts
        while client.state.status != "ready" or client.state.restarts == before:
            await asyncio.sleep(0.1)


async def changes(folder: Path, source: random.Random, counts: Counter[str]) -> None:
    """Change one file at a time."""
    while True:
        await asyncio.sleep(FAULT_SECONDS)
        files = list(folder.glob("*/*"))
        if len(files) < 2:
            continue
        one, other = source.sample(files, 2)
        how = source.choice(("changed", "cut", "exchanged", "deleted"))
        with contextlib.suppress(OSError):
            match how:
                case "changed":
                    place = source.randrange(one.stat().st_size)
                    with one.open("r+b") as file:
                        file.seek(place)
                        byte = file.read(1)[0]
                        file.seek(place)
                        file.write(bytes((byte ^ 1 << source.randrange(8),)))
                case "cut":
                    os.truncate(one, source.randrange(one.stat().st_size))
                case "exchanged":
                    shutil.copy(other, one)
                case "deleted":
                    one.unlink()
            counts[f"files {how}"] += 1


async def resets(client: EngineClient, counts: Counter[str]) -> None:
    while True:
        await asyncio.sleep(RESET_SECONDS)
        with contextlib.suppress(EngineError):
            await client.control(ResetCache())
            counts["resets"] += 1


async def full_disks(client: EngineClient, counts: Counter[str]) -> None:
    while True:
        for limit in (resource.RLIM_INFINITY, 4096):
            with contextlib.suppress(OSError):
                resource.prlimit(client.info.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                counts["full disks"] += limit == 4096
            await asyncio.sleep(FULL_SECONDS)


async def measure(folder: Path, count: int, seed: int) -> dict[str, Any]:
    source = random.Random(seed)
    config = EngineConfig(
        model=str(embedded_model()),
        name="faults",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_cache_bytes=8 << 20,
        speculation="off",
        threads=1,
    )
    plain = await spawn(config)
    load = Load(plain.info.vocab_size, source)
    right = await asyncio.gather(*(load.answer(plain, i, f"right-{i}") for i in range(DIFFERENT)))
    await plain.close()
    load.counts.clear()

    began = time.monotonic()
    client = await spawn(msgspec.structs.replace(config, kv_disk=f"{folder},64MiB"), resumes=True)
    faults = [
        asyncio.create_task(fault)
        for fault in (
            kills(client, load.counts),
            changes(folder, source, load.counts),
            resets(client, load.counts),
            full_disks(client, load.counts),
        )
    ]
    try:
        await load.run(client, count, right)
    finally:
        for task in faults:
            task.cancel()
        await asyncio.gather(*faults, return_exceptions=True)
    seconds = time.monotonic() - began
    await load.answer(client, 0, "last")  # its engine is the last one, and may have to be started first
    while any(client.stats().blocks_held) and time.monotonic() < began + seconds + 30:  # until blocks are written
        await asyncio.sleep(0.1)
    stats = client.stats()
    await client.close()
    return {
        "requests": count,
        "seconds": round(seconds, 1),
        **dict(sorted(load.counts.items())),
        "blocks": {"read": stats.disk_reads, "written": stats.disk_writes, "failed": stats.disk_failures},
        "blocks_held_at_the_end": sum(stats.blocks_held),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=1)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder) / "kv", args.requests, args.seed))
    write({"benchmark": "kv_faults", **result}, args.json)
    sys.exit(bool(result.get("wrong") or result["blocks_held_at_the_end"]))


if __name__ == "__main__":
    main()
