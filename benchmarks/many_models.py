"""Measures the KV budgets of language models that share one machine (docs/many-models.md).

peaks: three engines, one after the other with many requests, while the two others
have few. Their KV caches have one budget, or fixed thirds of it. Both arrangements take turns.
steady: the same engines, all with the same load: the tokens of each, compared with a third of what it has alone.
memory: an engine of the embedded model whose budget changes: how far its resident memory is from the budget; and
10,000 changes under load.

    python benchmarks/many_models.py --json benchmarks/results/amx/many_models.json --plot docs/images/many-models.svg
"""

import argparse
import asyncio
import contextlib
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from calm import Watch
from results import parser, write

from penstock.bench.workload import percentile, random_prompt
from penstock.cli.serving.kv_budgets import KVBudgets
from penstock.config import EngineConfig
from penstock.config.engine import LEASE_BYTES, LeasePlace
from penstock.engine.client import StreamingClient
from penstock.engine.link.ipc import spawn
from penstock.messages import GenerateRequest, Resize, SamplingParams
from penstock.weights.packaged import SMOLLM2, embedded_model

MODELS = 3
MANY, FEW = 20, 2  # clients of the model at its peak, and of the others
PROMPT, OUTPUT = 160, 48
SHARE = 48 << 20  # bytes of a KV cache: about 2,000 tokens
FIRST_TOKEN = 3.0  # seconds: a later first token does not count as good
STREAMS, WINDOW = 8, 1.0  # and seconds of each model in a window
CHANGES, RESIZES, NEAR = 8, 10_000, 0.05
MEMORY, LEAST = 128 << 20, 0.25  # bytes of the cache whose budget changes, and its smallest part
PRESSED = 0.08, 0.14  # parts of it in which 8 streams do not fit
BURST = 5  # changes that are sent at once


async def start(model: str, place: int, segment: Path, *, elastic: bool, sequences: int = MANY) -> StreamingClient:
    config = EngineConfig(
        model=model,
        name=f"model-{place}",
        max_model_len=512,
        max_num_seqs=sequences,
        kv_cache_bytes=SHARE,
        kv_reserve_bytes=MODELS * SHARE if elastic else None,
        enable_prefix_caching=False,
        lease=LeasePlace(path=str(segment), place=place),
    )
    return await spawn(config)


@contextlib.asynccontextmanager
async def three(
    models: Sequence[str], folder: Path, *, elastic: bool
) -> AsyncIterator[tuple[list[StreamingClient], Path]]:
    """Engines that take turns, by the segment in a file, and have one budget if they are `elastic`."""
    segment = folder / f"lease-{time.monotonic()}"
    segment.write_bytes(bytes(LEASE_BYTES))
    clients, budgets = [], KVBudgets()
    for place, model in enumerate(models):
        clients.append(await start(model, place, segment, elastic=elastic))
        if elastic:
            size = EngineConfig(model="", name="", kv_cache_bytes=SHARE, kv_reserve_bytes=MODELS * SHARE)
            budgets.add(clients[-1], size)
    following = asyncio.create_task(budgets.follow())
    try:
        yield clients, segment
    finally:
        following.cancel()
        for client in clients:
            await client.close()


async def stream(client: StreamingClient, source: random.Random, output: int = OUTPUT) -> float:
    """Runs a request to its end. Returns the seconds to its first token."""
    began, first = time.monotonic(), 0.0
    prompt = random_prompt(PROMPT, client.info.vocab_size, source)
    sampling = SamplingParams(seed=1, max_tokens=output, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(request_id=f"{began}-{source.random()}", prompt_ids=prompt, sampling=sampling)
    async with contextlib.aclosing(client.generate(request)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            first = first or time.monotonic() - began
    return first


async def peaks(models: Sequence[str], folder: Path, *, elastic: bool) -> dict[str, Any]:
    """TTFT, goodput and preemptions while each model has its peak in turn."""
    source, firsts, timeline = random.Random(1), list[tuple[float, float]](), list[list[float]]()
    async with three(models, folder, elastic=elastic) as (clients, _):
        await asyncio.gather(*(stream(client, source) for client in clients))
        began = time.monotonic()

        async def load(client: StreamingClient, count: int) -> None:
            """So many clients, which send two requests each."""

            async def twice() -> None:
                for _ in range(2):
                    sent = time.monotonic() - began
                    firsts.append((sent, await stream(client, source)))

            await asyncio.gather(*(twice() for _ in range(count)))

        async def watch() -> None:
            """Notes the MiB of the KV blocks in use, of each model."""
            while True:
                used = [each.stats().blocks_held[0] / (each.info.num_blocks[0] - 1) for each in clients]
                most = [sum(row.bytes for row in each.info.memory if row.name == "KV cache") for each in clients]
                sizes = [share * size / 2**20 for share, size in zip(used, most, strict=True)]
                timeline.append([time.monotonic() - began, *sizes])
                await asyncio.sleep(0.1)

        watching = asyncio.create_task(watch())
        for peak in clients:
            await asyncio.gather(*(load(client, MANY if client is peak else FEW) for client in clients))
        watching.cancel()
        seconds = time.monotonic() - began
        times = [first for _, first in firsts]
        return {
            "ttft_p50": median(times),
            "ttft_p99": percentile(times, 0.99),
            "goodput": OUTPUT * sum(first <= FIRST_TOKEN for first in times) / seconds,
            "seconds": seconds,
            "preemptions": sum(client.stats().preemptions for client in clients),
            "firsts": firsts,
            "timeline": timeline,
        }


def held(segment: Path) -> float:
    """Seconds for which engines of weight 1 have computed. See native/cpp/lease.h."""
    data = segment.read_bytes()
    return sum(int.from_bytes(data[64 * place + 16 :][:8], "little") for place in range(1, MODELS + 1)) / 1e9


async def rates(clients: Sequence[StreamingClient], segment: Path) -> tuple[list[float], float]:
    """Tokens a second of each engine while all have the same load, and the part of the time in which one computes."""
    source, before = random.Random(2), [client.stats().decode_tokens for client in clients]
    tasks = [asyncio.create_task(stream(client, source, 350)) for client in clients for _ in range(STREAMS)]
    while any(
        client.stats().running < STREAMS or client.stats().decode_tokens < then + 2 * STREAMS
        for client, then in zip(clients, before, strict=True)
    ):  # all prompts are computed
        await asyncio.sleep(0.02)
    before, used, began = [client.stats().decode_tokens for client in clients], held(segment), time.perf_counter()
    await asyncio.sleep(WINDOW * len(clients))
    passed, used = time.perf_counter() - began, held(segment) - used
    found = [(each.stats().decode_tokens - then) / passed for each, then in zip(clients, before, strict=True)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while not all(client.idle for client in clients):
        await asyncio.sleep(0.02)
    return found, used / passed


async def steady(models: Sequence[str], folder: Path, rounds: int) -> dict[str, Any]:
    """What each engine has beside the others, divided by its share, a third of what it has alone. The speed of the
    machine changes within seconds: so each engine runs alone just before and just after all run, and the mean of the
    two counts."""
    found, computing = list[list[float]](), list[float]()
    async with three(models, folder, elastic=True) as (clients, segment):
        for _ in range(rounds):
            before = [(await rates([client], segment))[0][0] for client in clients]
            together, used = await rates(clients, segment)
            after = [(await rates([client], segment))[0][0] for client in reversed(clients)][::-1]
            found.append([2 * MODELS * both / (a + b) for a, both, b in zip(before, together, after, strict=True)])
            computing.append(used)
    each = {f"model {place}": list(column) for place, column in enumerate(zip(*found, strict=True))}
    each["all"] = [sum(row) / MODELS for row in found]
    each["an engine computes"] = computing  # of the time in which all have work
    return {name: {"median": median(row), "rounds": row} for name, row in each.items()}


def resident(pid: int, size: int) -> int:
    """Resident bytes of the mapping of a process that has a KV cache of `size` bytes: the smallest that could."""
    mappings = re.findall(r"Size: +(\d+) kB\n.*?\nRss: +(\d+) kB", Path(f"/proc/{pid}/smaps").read_text(), re.DOTALL)
    return 1024 * min((int(total), int(rss)) for total, rss in mappings if 1024 * int(total) >= size)[1]


async def memory() -> dict[str, Any]:
    """An engine whose cache is full of prefixes, and gets another budget again and again."""
    config = EngineConfig(
        model=str(embedded_model()), name="m", max_model_len=512, kv_cache_bytes=MEMORY, kv_reserve_bytes=MEMORY
    )
    client, source = await spawn(config), random.Random(3)
    behind, given_back = list[float](), list[float]()
    page = MEMORY / client.info.num_blocks[0]

    async def fill() -> None:
        blocks = client.info.num_blocks[0]
        await asyncio.gather(*(stream(client, source, 2) for _ in range(2 * blocks * client.info.block_size // PROMPT)))

    try:
        await fill()
        full = resident(client.info.pid, MEMORY)
        for _ in range(CHANGES):
            budget = (part := source.uniform(LEAST, 1.0)) * (client.info.num_blocks[0] - 1) * page
            began = time.monotonic()
            await client.control(Resize(part))
            while resident(client.info.pid, MEMORY) > (1 + NEAR) * budget:
                await asyncio.sleep(0.01)
            given_back.append(time.monotonic() - began)
            await fill()
            behind.append(resident(client.info.pid, MEMORY) / budget - 1)
        changes, began = 0, time.monotonic()
        streams = [asyncio.create_task(stream(client, source, 300)) for _ in range(8)]
        while changes < RESIZES:
            sizes = [Resize(source.uniform(*PRESSED)) for _ in range(BURST)]
            await asyncio.gather(*map(client.control, sizes))
            changes += BURST
            streams = [
                each if not each.done() else asyncio.create_task(stream(client, source, 300)) for each in streams
            ]
        seconds = time.monotonic() - began
        await asyncio.gather(*streams)
        await client.control(Resize(1.0))
        await fill()
        stats = client.stats()
        return {
            "budgets": CHANGES,
            "given_back_s": max(given_back),
            "most_behind": max(map(abs, behind)),
            "resizes": changes,
            "resizes_a_second": changes / seconds,
            "preemptions": stats.preemptions,
            "blocks_held_after": sum(stats.blocks_held),
            "resident_after": resident(client.info.pid, MEMORY) / full,
        }
    finally:
        await client.close()


def plot(file: Path, found: dict[str, Any]) -> None:
    """Draws the KV blocks in use and the times to the first token of the last round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(9, 5), sharex=True, sharey="row", layout="constrained")
    for column, (kind, title) in zip(axes.T, (("budget", "one budget"), ("thirds", "fixed thirds")), strict=True):
        last = found[kind][-1]
        at, *used = zip(*last["timeline"], strict=True)
        for place, values in enumerate(used):
            column[0].plot(at, values, label=f"model {place}")
        column[0].set(title=title)
        column[1].plot(*zip(*last["firsts"], strict=True), ".", color="#0f8a8f", ms=3)
        column[1].set(xlabel="seconds", yscale="log")
    axes[0, 0].set_ylabel("KV blocks in use, MiB")
    axes[1, 0].set_ylabel("time to the first token, s")
    axes[0, 0].legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of each figure, with those of all rounds."""
    numbers = [name for name, value in runs[0].items() if not isinstance(value, list)]
    return {
        name: {"median": median(run[name] for run in runs), "rounds": [run[name] for run in runs]} for name in numbers
    }


def main() -> None:
    given: argparse.ArgumentParser = parser(__doc__)
    given.add_argument("--only", choices=("peaks", "steady", "memory"))
    given.add_argument(
        "--models", nargs=MODELS, default=[str(SMOLLM2.locate())] * MODELS, help="SmolLM2 is the default"
    )
    given.add_argument("--rounds", type=int, default=2)
    given.add_argument("--plot", type=Path, metavar="FILE", help="also draw the last round of peaks into this file")
    options = given.parse_args()
    found: dict[str, Any] = {}
    watch, began = Watch(), time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only in (None, "peaks"):
            runs: dict[str, list[dict[str, Any]]] = {"budget": [], "thirds": []}
            for number in range(options.rounds):
                for kind in runs if number % 2 == 0 else reversed(runs):
                    print(kind, number, file=sys.stderr)
                    runs[kind].append(asyncio.run(peaks(options.models, folder, elastic=kind == "budget")))
            found["peaks"] = {kind: summary(each) for kind, each in runs.items()}
            if options.plot is not None:
                plot(options.plot, runs)
        if options.only in (None, "steady"):
            found["steady"] = asyncio.run(steady(options.models, folder, options.rounds))
        if options.only in (None, "memory"):
            found["memory"] = asyncio.run(memory())
    write({**found, "calm_share": watch.share(began, time.perf_counter())}, options.json)


if __name__ == "__main__":
    main()
