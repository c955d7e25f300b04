"""Measures what a fleet costs and what its routing saves.

    python benchmarks/fleet.py --json benchmarks/results/avx512/fleet.json

choose   the processor time of a choice among 64 engines for a prompt of 32k tokens, with the look into the index and
         the booking; that of a new picture of the engines' statistics, which is made at most 20 times a second; that
         of hashing the prompt's blocks; and the bytes of an entry of the index
link     one engine over TCP beside the same model's engine over a socket pair, in turns: the time to the first token,
         what TCP adds to it (median, least and most of the rounds), and the processor time that the front and the
         engine's host take for a token
routes   two engines on this machine, and traffic whose prompts share prefixes: conversations that come back, and long
         documents with questions. The prefixes fit into the KV caches of both together, not into one. `cost` beside
         `round-robin`, in turns, on the same engines with empty caches. `possible` is the share of prompt tokens that
         one cache without a limit would have. `alone`: the same prompts one after the other, with `cost`: nothing
         waits, and what was sent before is cached, so no router is better. `later`: without the first visit of each
         document or conversation, which is cold with any router
loads    the same engines and traffic, but the prompts come at random times (Poisson), at shares of the rate that
         `round-robin` reaches when 16 prompts are there at any time
"""

import asyncio
import contextlib
import itertools
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from results import parser, write
from servers import start

from penstock.bench.workload import random_prompt
from penstock.cluster import BlockIndex, FleetView, ReplicaView, RouteRequest, choose
from penstock.cluster.client import FleetClient
from penstock.cluster.route import ROUTES
from penstock.engine.link.ipc import spawn
from penstock.engine.remote.connector import connect_engine
from penstock.messages import BlockChanges, BlockKeys, EngineClient, GenerateRequest, ResetCache, SamplingParams
from penstock.prepare.model import find_model, prepare_found

REPLICAS, PROMPT, BLOCK = 64, 32_000, 16
CHOICES = 2000
MODEL = "python-8m"  # of `link`
ROUTED, KV_BYTES = "smollm2-135m", "120MiB"  # of `routes`: 12 documents of 640 tokens fit into two caches, not into one
FLAGS = ("--max-num-seqs", "64", "--threads", "1")
LOADS = 0.5, 0.75, 0.9
SIDES = {"cost": ("cost", 2), "round-robin": ("round-robin", 2), "alone": ("cost", 1)}  # route, prompts at a time


# -- choose -----------------------------------------------------------------------------------------------------------


def measure_choose() -> dict[str, Any]:
    drawn = random.Random(1)
    replicas = [
        ReplicaView(
            name=f"10.0.0.{number}:9000",
            max_num_seqs=64,
            max_model_len=131_072,
            kv_tokens=500_000,
            running=drawn.randrange(64),
            waiting=drawn.randrange(4),
            backlog_tokens=drawn.randrange(5000),
            kv_usage=drawn.random(),
            stats_age=0.1,
            prefill_seconds=drawn.uniform(1e-4, 2e-4),
            step_seconds=0.02,
            row_seconds=2e-4,
            request_seconds=5.0,
        )
        for number in range(REPLICAS)
    ]
    prompt = [drawn.randrange(30_000) for _ in range(PROMPT)]
    chain, keys = BlockKeys(BLOCK, "weights"), []
    began = time.thread_time()
    chain.extend(keys, chain.root(""), prompt, PROMPT // BLOCK)
    hashing = time.thread_time() - began
    index = BlockIndex()
    for number, replica in enumerate(replicas):
        index.join(replica.name, 1)
        index.apply(replica.name, 1, BlockChanges(1, tuple(keys[: number * len(keys) // REPLICAS])))
    taken, pictures, names = [], [], [replica.name for replica in replicas]
    for seed in range(CHOICES):
        if seed % 16 == 0:  # then bookings of 16 requests are in the view
            began = time.thread_time()
            view = FleetView.of(replicas)
            pictures.append(time.thread_time() - began)
        began = time.thread_time()
        cached = {name: count * BLOCK for name, count in index.match(keys, 0.0).items()}
        chosen = choose(view, RouteRequest(prompt_tokens=PROMPT, cached=cached), seed).replicas[0]
        place = names.index(chosen)
        before = view.replicas[place]
        more = before.booked_requests + 1, before.booked_tokens + PROMPT - cached.get(chosen, 0)
        view = view.changed([(place, replace(before, booked_requests=more[0], booked_tokens=more[1]))])
        taken.append(time.thread_time() - began)
    taken.sort()
    return {
        "replicas": REPLICAS,
        "prompt_tokens": PROMPT,
        "choose_ms_median": round(1e3 * statistics.median(taken), 3),
        "choose_ms_p99": round(1e3 * taken[int(0.99 * CHOICES)], 3),
        "picture_ms_median": round(1e3 * statistics.median(pictures), 3),
        "hash_ms": round(1e3 * hashing, 2),
        "index_bytes_a_block": round(entry_bytes()),
    }


def entry_bytes(count: int = 200_000) -> float:
    tracemalloc.start()
    index = BlockIndex()
    index.join("one", 1)
    for first in range(0, count, 1000):
        keys = tuple(random.randbytes(32) for _ in range(1000))
        index.apply("one", 1, BlockChanges(first // 1000 + 1, keys))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / count


# -- engines ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts(model: str, count: int, *flags: str) -> Iterator[list[tuple[subprocess.Popen[bytes], str]]]:
    """`penstock engine` processes and their addresses."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        found = []
        for number in range(count):
            log = Path(folder, str(number))
            command = [sys.executable, "-m", "penstock", "engine", model, "--listen", "127.0.0.1:0", *FLAGS, *flags]
            process = start(command, stderr=log.open("wb"))
            held.callback(process.wait)
            held.callback(process.kill)
            found.append((process, log))
        yield [(process, address_of(process, log)) for process, log in found]


def address_of(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(1200):
        if match := re.search(r"listens on (\S+),", log.read_text()):
            return match[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"the engine does not listen:\n{log.read_text()}")


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def read(client: EngineClient, name: str, prompt: tuple[int, ...], tokens: int) -> tuple[float, int, float]:
    """Seconds to the first token, cached tokens of the prompt, and seconds in all."""
    sampling = SamplingParams(seed=1, max_tokens=tokens, temperature=0.0, ignore_eos=True)
    began, first, cached = time.perf_counter(), 0.0, 0
    async for delta in client.generate(GenerateRequest(request_id=name, prompt_ids=prompt, sampling=sampling)):
        if not first:
            first, cached = time.perf_counter() - began, delta.cached_tokens
    return first, cached, time.perf_counter() - began


# -- link -------------------------------------------------------------------------------------------------------------


async def measure_link(rounds: int, streams: int = 16, tokens: int = 300) -> dict[str, Any]:
    prepared = prepare_found(find_model(MODEL, {"max_num_seqs": "64", "threads": "1", "kv_cache_memory": "64MiB"}))
    with hosts(MODEL, 1, "--kv-cache-memory", "64MiB") as [(process, address)]:
        direct = await spawn(prepared.resolved.engine)
        fleet = FleetClient(clock=time.monotonic)
        fleet.join(address, await connect_engine(address, ""))
        names, source = itertools.count(), random.Random(2)
        firsts: dict[str, list[float]] = {"direct": [], "tcp": []}  # the median of each round
        costs: dict[str, list[float]] = {"direct": [], "tcp": [], "host": []}
        clients: dict[str, EngineClient] = {"direct": direct, "tcp": fleet}
        for turn in range(rounds):
            for kind, client in list(clients.items())[:: 1 if turn % 2 else -1]:
                taken = []
                for _ in range(20):
                    prompt = random_prompt(64, client.info.vocab_size, source)
                    taken.append((await read(client, str(next(names)), prompt, 2))[0])
                firsts[kind].append(statistics.median(taken))
                prompts = [random_prompt(16, client.info.vocab_size, source) for _ in range(streams)]
                own, other = time.process_time(), processor_seconds(process.pid)
                await asyncio.gather(*(read(client, str(next(names)), prompt, tokens) for prompt in prompts))
                costs[kind].append((time.process_time() - own) / streams / tokens)
                if kind == "tcp":
                    costs["host"].append((processor_seconds(process.pid) - other) / streams / tokens)
        await fleet.close()
        await direct.close()
    added = sorted(1e3 * (tcp - direct) for direct, tcp in zip(firsts["direct"], firsts["tcp"], strict=True))
    medians = {kind: statistics.median(values) for kind, values in firsts.items()}
    each = {kind: 1e6 * statistics.median(values) for kind, values in costs.items()}
    return {
        "model": MODEL,
        "ttft_ms_direct": round(1e3 * medians["direct"], 2),
        "ttft_ms_tcp": round(1e3 * medians["tcp"], 2),
        "ttft_ms_added": [round(value, 2) for value in (statistics.median(added), added[0], added[-1])],
        "front_us_a_token_direct": round(each["direct"], 1),
        "front_us_a_token_tcp": round(each["tcp"], 1),
        "front_us_a_token_added": round(each["tcp"] - each["direct"], 1),
        "host_us_a_token": round(each["host"], 1),
    }


# -- routes -----------------------------------------------------------------------------------------------------------


class Traffic:
    """Prompts that share prefixes, in the order in which they are sent."""

    def __init__(self, kind: str, vocab_size: int, seed: int) -> None:
        source = random.Random(seed)
        self.first = 12 if kind == "documents" else 10  # visits: each is the first of a document or conversation
        self.prompts: list[tuple[int, ...]] = []
        if kind == "documents":
            documents = [random_prompt(640, vocab_size, source) for _ in range(self.first)]
            for _ in range(6):
                source.shuffle(documents)
                self.prompts += [each + random_prompt(24, vocab_size, source) for each in documents]
        else:
            sessions = [random_prompt(200, vocab_size, source) for _ in range(self.first)]
            for _ in range(8):
                order = list(range(len(sessions)))
                source.shuffle(order)
                for number in order:
                    sessions[number] += random_prompt(60, vocab_size, source)
                    self.prompts.append(sessions[number])
        self.possible = possible(self.prompts)


def possible(prompts: list[tuple[int, ...]]) -> float:
    """The share of prompt tokens that a cache without a limit has, in whole blocks."""
    chain, seen, found = BlockKeys(BLOCK, ""), set(), 0
    for prompt in prompts:
        keys: list[bytes] = []
        chain.extend(keys, chain.root(""), prompt, (len(prompt) - 1) // BLOCK)
        found += BLOCK * sum(1 for key in keys if key in seen)
        seen.update(keys)
    return found / sum(map(len, prompts))


@contextlib.asynccontextmanager
async def front(route: str, addresses: list[str]) -> AsyncIterator[FleetClient]:
    fleet = FleetClient(ROUTES[route], clock=time.monotonic, seed=1)
    for address in addresses:
        fleet.join(address, await connect_engine(address, ""))
    try:
        yield fleet
    finally:
        await fleet.close()


async def run(
    route: str, at_once: int, addresses: list[str], traffic: Traffic, starts: Sequence[float] = ()
) -> dict[str, float]:
    """Sends the prompts, at most so many at a time. `starts` are the seconds at which they come; none: at once."""
    async with front(route, addresses) as fleet:
        await fleet.control(ResetCache())
        gate, began = asyncio.Semaphore(at_once), time.perf_counter()

        async def one(number: int, prompt: tuple[int, ...]) -> tuple[float, int, float]:
            if starts:
                await asyncio.sleep(began + starts[number] - time.perf_counter())
            async with gate:
                return await read(fleet, f"{route}-{number}", prompt, 8)

        results = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(traffic.prompts)))
        seconds = time.perf_counter() - began
        computed = [each.prompt_tokens for each in fleet.replicas]
        cached = sum(result[1] for result in results)
        times = [result[0] for result in results]
        return {
            "reuse": cached / sum(computed),
            "ttft": statistics.mean(times),
            "ttft_later": statistics.mean(times[traffic.first :]),
            "ttft_p50": statistics.median(times),
            "ttft_p99": sorted(times)[int(0.99 * len(times))],
            "rate": len(times) / seconds,
            "share_of_largest": max(computed) / sum(computed),
        }


def median(runs: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(each[name] for each in runs), 4)


def ratios(over: list[dict[str, float]], runs: list[dict[str, float]], name: str) -> list[float]:
    """By round, the least first."""
    return sorted(round(other[name] / own[name], 2) for other, own in zip(over, runs, strict=True))


@contextlib.asynccontextmanager
async def routed() -> AsyncIterator[tuple[list[str], int, int]]:
    """Two engines: their addresses, the size of their vocabulary, and the tokens that fit into the cache of one."""
    with hosts(ROUTED, 2, "--max-model-len", "1024", "--kv-cache-memory", KV_BYTES) as running:
        addresses = [address for _, address in running]
        client = await connect_engine(addresses[0], "")
        vocab, tokens = client.info.vocab_size, (min(client.info.num_blocks) - 1) * client.info.block_size
        await client.close()
        yield addresses, vocab, tokens


async def measure_loads(rounds: int, kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with routed() as (addresses, vocab, _):
        for kind in kinds:
            runs: dict[str, list[dict[str, float]]] = {}
            for turn in range(rounds):
                traffic, source = Traffic(kind, vocab, turn), random.Random(turn)
                most = (await run("round-robin", 16, addresses, traffic))["rate"]
                gaps = [source.expovariate(1.0) for _ in traffic.prompts]
                for load in LOADS:
                    starts = list(itertools.accumulate(gap / load / most for gap in gaps))
                    for route in ("cost", "round-robin")[:: 1 if turn % 2 else -1]:
                        result = await run(route, len(starts), addresses, traffic, starts)
                        runs.setdefault(f"{route} {load}", []).append(result)
            found[kind] = [
                {"load": load}
                | {
                    f"{name} {route}": median(runs[f"{route} {load}"], name)
                    for route in ("cost", "round-robin")
                    for name in ("rate", "reuse", "ttft", "ttft_p50", "ttft_p99")
                }
                | {
                    f"{name}_ratio": ratios(runs[f"round-robin {load}"], runs[f"cost {load}"], name)
                    for name in ("ttft", "ttft_p50", "ttft_p99")
                }
                for load in LOADS
            ]
    return found


async def measure_routes(rounds: int, kinds: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with routed() as (addresses, vocab, tokens):
        for kind in kinds:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
            for turn in range(rounds):
                traffic = Traffic(kind, vocab, turn)
                for name in list(runs)[:: 1 if turn % 2 else -1]:
                    runs[name].append(await run(*SIDES[name], addresses, traffic))
            found[kind] = {
                "possible": round(traffic.possible, 3),
                **{f"{name} {side}": median(results, name) for side, results in runs.items() for name in results[0]},
                **{
                    f"{name}_ratio {side}": ratios(runs["round-robin"], runs[side], name)
                    for side in ("cost", "alone")
                    for name in ("ttft", "ttft_later")
                },
            }
    return {"kv_tokens_of_an_engine": tokens, **found}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="choose,link,routes,loads", help="parts, with commas between them")
    arguments.add_argument("--rounds", type=int, default=5, help="turns of each kind (5)")
    arguments.add_argument("--traffic", default="documents,conversations", help="of routes and loads")
    given = arguments.parse_args()
    result: dict[str, Any] = {"benchmark": "fleet"}
    parts = given.only.split(",")
    if "choose" in parts:
        result["choose"] = measure_choose()
    if "link" in parts:
        result["link"] = asyncio.run(measure_link(given.rounds))
    if "routes" in parts:
        result["routes"] = asyncio.run(measure_routes(given.rounds, given.traffic.split(",")))
    if "loads" in parts:
        result["loads"] = asyncio.run(measure_loads(given.rounds, given.traffic.split(",")))
    write(result, given.json)


if __name__ == "__main__":
    main()
