"""Sends thousands of requests to an engine with a disk tier while everything goes wrong, and compares every answer.

Requests continue a few long texts, in a KV cache that holds only some of them, so blocks go to disk and come back all
the time. Meanwhile the engine is killed, files are changed, cut, exchanged and deleted, clients leave, the cache is
reset, and files may suddenly not be larger than half a page (RLIMIT_FSIZE), as on a full disk. Each answer is compared
with that of an engine without the tier. Exits with 1 if a token differs or a block stays held.

With `--apart` an engine computes prompts and another one answers, each with a disk tier. Then either is killed, and
what goes between them passes a proxy, which changes bytes, and cuts and stops connections.

    python benchmarks/kv_faults.py --requests 10000 --json benchmarks/results/amx/kv_faults.json
"""

import asyncio
import contextlib
import os
import random
import resource
import secrets
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
from penstock.cluster import FleetView, RouteChoice, RouteRequest, choose
from penstock.cluster.client import FleetClient
from penstock.cluster.replica import Replica
from penstock.config import EngineConfig
from penstock.config.engine import PageAccess
from penstock.engine.client import StreamingClient
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
STOPPED_SECONDS = 5.0  # of a connection between engines
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


async def kills(engines: Sequence[StreamingClient], source: random.Random, counts: Counter[str]) -> None:
    while True:
        await asyncio.sleep(KILL_SECONDS)
        engine = source.choice(engines)
        before = engine.state.restarts
        os.kill(engine.info.pid, signal.SIGKILL)
        counts["kills"] += 1
        while engine.state.status != "ready" or engine.state.restarts == before:
            await asyncio.sleep(0.1)


async def changes(folder: Path, source: random.Random, counts: Counter[str]) -> None:
    """Change one file at a time."""
    while True:
        await asyncio.sleep(FAULT_SECONDS)
        files = list(folder.glob("*/*/*"))
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


async def full_disks(engines: Sequence[StreamingClient], counts: Counter[str]) -> None:
    while True:
        for limit in (resource.RLIM_INFINITY, 4096):
            for engine in engines:
                with contextlib.suppress(OSError):
                    resource.prlimit(engine.info.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                    counts["full disks"] += limit == 4096
            await asyncio.sleep(FULL_SECONDS)


class FaultyProxy:
    """Passes what goes between two engines. Some connections are damaged, cut or stopped at a random byte."""

    def __init__(self, engine: StreamingClient, source: random.Random, counts: Counter[str]) -> None:
        self._engine, self._source, self._counts = engine, source, counts

    async def start(self) -> str:
        """Listen. Returns the address."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (fault,) = self._source.choices(("", "damaged", "cut", "stopped"), (5, 2, 2, 1))
        self._counts[f"connections {fault or 'whole'}"] += 1
        try:
            inner, outer = await asyncio.open_connection("127.0.0.1", self._engine.info.page_port)
        except OSError:  # it was killed
            writer.close()
            return
        to_engine = asyncio.create_task(self._pass(reader, outer, "", 0))
        await self._pass(inner, writer, fault, self._source.randrange(200, 60_000))
        to_engine.cancel()
        writer.close()
        outer.close()

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, fault: str, place: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                if fault and passed <= place < passed + len(data):
                    if fault == "cut":
                        return
                    if fault == "stopped":
                        await asyncio.sleep(STOPPED_SECONDS)
                    data = bytearray(data)
                    data[place - passed] ^= 1 << self._source.randrange(8)
                passed += len(data)
                target.write(data)
                await target.drain()


def apart(view: FleetView, request: RouteRequest, seed: int) -> RouteChoice:
    """The production route, but three of four prompts are computed by the engine for prompts, also short ones."""
    choice = choose(view, request, seed)
    names = [one.name for one in view.replicas if one.role == "prefill" and one.status == "ready"]
    if not names or not choice.replicas or names[0] == choice.replicas[0] or not seed % 4:
        return choice
    return msgspec.structs.replace(choice, source=names[0], computes=True)


async def fleet_of(
    config: EngineConfig, folder: Path, source: random.Random, counts: Counter[str]
) -> tuple[FleetClient, list[StreamingClient]]:
    """An engine that computes prompts, and one that answers, with a faulty network between them."""
    fleet, engines, key = FleetClient(apart, clock=time.monotonic, seed=1), [], secrets.token_hex(16)
    for name in ("prefill", "decode"):
        own = {"role": name, "pages": PageAccess(key=key), "kv_disk": f"{folder / name},64MiB"}
        engines.append(await spawn(msgspec.structs.replace(config, **own), resumes=True))
        fleet.join(name, engines[-1])
    address = await FaultyProxy(engines[0], source, counts).start()
    Replica.page_address = address  # type: ignore[assignment,method-assign]
    return fleet, engines


async def measure(folder: Path, count: int, seed: int, is_apart: bool) -> dict[str, Any]:
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
    client: FleetClient | StreamingClient
    if is_apart:
        client, engines = await fleet_of(config, folder, source, load.counts)
    else:
        client = await spawn(msgspec.structs.replace(config, kv_disk=f"{folder / 'one'},64MiB"), resumes=True)
        engines = [client]
    faults = [
        asyncio.create_task(fault)
        for fault in (
            kills(engines, source, load.counts),
            changes(folder, source, load.counts),
            resets(client, load.counts),
            full_disks(engines, load.counts),
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
    end = time.monotonic() + 30
    while (held := sum(sum(engine.stats().blocks_held) for engine in engines)) and time.monotonic() < end:
        await asyncio.sleep(0.1)  # until blocks are written
    stats = client.stats()
    await client.close()
    return {
        "requests": count,
        "seconds": round(seconds, 1),
        **dict(sorted(load.counts.items())),
        "blocks": {"read": stats.disk_reads, "written": stats.disk_writes, "failed": stats.disk_failures},
        "blocks_between_engines": {
            "read": stats.peer_reads,
            "sent": stats.peer_sends,
            "cut_short": stats.peer_failures,
        },
        "blocks_held_at_the_end": held,
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, default=10_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--apart", action="store_true", help="an engine for prompts, and one that answers")
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder) / "kv", args.requests, args.seed, args.apart))
    write({"benchmark": "kv_faults", **result}, args.json)
    sys.exit(bool(result.get("wrong") or result["blocks_held_at_the_end"]))


if __name__ == "__main__":
    main()
