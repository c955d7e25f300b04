"""Measures what a tenant with few clients feels of one with many, on a real server.

    python benchmarks/tenants.py --json benchmarks/results/avx512/tenants.json

Rounds take turns: the light tenant alone; beside a heavy tenant with many clients; the same with classes, where the
heavy one's requests are of a class that leaves places free and has few prompt tokens in a step; and, as the peer, both
without tenants: first come, first served. Each client of the heavy tenant sends its next request as soon as it has an
answer. The light tenant sends one request a second. Figures are its TTFT, and the tokens per second of all.
"""

import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from overload import Server, serving
from results import parser, write

from penstock.bench.workload import percentile
from penstock.cli.output import show_table
from penstock.config.tenants.keys import new_key
from penstock.weights.packaged import EMBEDDED, SMOLLM2

MODELS = {"python-8m": EMBEDDED, "smollm2-135m": SMOLLM2.name}
PROMPT, OUTPUT = 96, 24  # tokens
CASES = ("alone", "tenants", "classes", "first come")


def tenants_file(folder: Path, case: str) -> tuple[Path, dict[str, str]]:
    """Writes the tenants file of a case. Returns it and the keys by tenant."""
    keys, tenants = {}, {}
    for name in ("light", "heavy"):
        keys[name], key_id, stored = new_key()
        tenants[name] = {"keys": [{"name": "k", "id": key_id, "hash": stored}]}
    content: dict[str, Any] = {"tenants": tenants}
    if case == "classes":
        content["classes"] = {"standard": {"reserved": 2}, "batch": {"rank": 1, "step_tokens": 64}}
        tenants["heavy"]["class"] = "batch"  # type: ignore[assignment]
    file = folder / f"{case}.yaml"
    file.write_text(json.dumps(content))
    return file, keys


class Clients:
    """Clients of one tenant, each with one request at a time."""

    def __init__(self, http: aiohttp.ClientSession, server: Server, key: str, seed: int) -> None:
        self.first: list[float] = []  # seconds to the first token
        self.tokens = 0
        self._http, self._url = http, server.url + "/v1/completions"
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._random = random.Random(seed)

    async def send(self) -> None:
        body = {
            "prompt": [self._random.randrange(100, 1000) for _ in range(PROMPT)],
            "max_tokens": OUTPUT,
            "ignore_eos": True,
            "stream": True,
            "logit_bias": {"500": 100.0},  # a token that is text
        }
        began, first = time.monotonic(), 0.0
        async with self._http.post(self._url, json=body, headers=self._headers) as answer:
            answer.raise_for_status()
            async for _ in answer.content:
                first = first or time.monotonic() - began
        self.first.append(first)
        self.tokens += OUTPUT

    async def flat_out(self) -> None:
        while True:
            await self.send()


async def measure(server: Server, keys: dict[str, str], seconds: float, heavy: int, seed: int) -> dict[str, float]:
    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        light = Clients(http, server, keys.get("light", ""), seed)
        many = Clients(http, server, keys.get("heavy", ""), seed + 1)
        await light.send()
        light.first.clear()
        load = [asyncio.create_task(many.flat_out()) for _ in range(heavy)]
        await asyncio.sleep(3.0 if heavy else 0.0)
        began, before = time.monotonic(), many.tokens
        asked = []
        while time.monotonic() - began < seconds:
            asked.append(asyncio.create_task(light.send()))
            await asyncio.sleep(1.0)
        await asyncio.gather(*asked)
        rate = (many.tokens - before + light.tokens - OUTPUT) / (time.monotonic() - began)
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    return {"p50": percentile(light.first, 0.5), "p99": percentile(light.first, 0.99), "tok_s": rate}


@contextlib.contextmanager
def started(model: str, case: str, folder: Path, places: int) -> Iterator[tuple[Server, dict[str, str]]]:
    flags = ["--threads", "1", "--max-num-seqs", str(places), "--kv-cache-memory", "128MiB", "--speculation", "off"]
    flags += ["--state-dir", str(folder / f"state-{case}"), "--access-log", "0", "--max-waiting", "1024"]
    keys: dict[str, str] = {}
    if case != "first come":
        file, keys = tenants_file(folder, case)
        flags += ["--tenants", str(file)]
    with serving(model, flags, folder / f"log-{case}") as server:
        asyncio.run(_ready(server))
        yield server, keys


async def _ready(server: Server) -> None:
    async with aiohttp.ClientSession() as http:
        for _ in range(1200):
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(server.url + "/readyz") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    sys.exit(f"the server did not start: {server.log.read_text()}")


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--model", choices=MODELS, default="python-8m")
    args.add_argument("--seconds", type=float, default=30.0, help="of a round")
    args.add_argument("--rounds", type=int, default=3)
    args.add_argument("--heavy", type=int, default=200, help="clients of the heavy tenant")
    args.add_argument("--places", type=int, default=32, help="sequences that run at a time")
    given = args.parse_args()
    found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.rounds):
            for case in CASES if number % 2 == 0 else reversed(CASES):
                heavy = 0 if case == "alone" else given.heavy
                with started(MODELS[given.model], case, Path(folder), given.places) as (server, keys):
                    found[case].append(asyncio.run(measure(server, keys, given.seconds, heavy, number)))
                print(f"{case}: {found[case][-1]}", flush=True)
    rows = [
        {"case": case, **{name: median(each[name] for each in rounds) for name in rounds[0]}}
        for case, rounds in found.items()
    ]
    alone = rows[0]
    for row in rows:
        row["p99_ratio"] = row["p99"] / alone["p99"]
    columns = [("case", "case"), ("TTFT P50 s", "p50"), ("TTFT P99 s", "p99"), ("/ alone", "p99_ratio")]
    show_table("A light tenant beside a heavy one", [*columns, ("tok/s", "tok_s")], rows)
    write(
        {"model": given.model, "heavy": given.heavy, "places": given.places, "rows": rows, "rounds": found}, given.json
    )


if __name__ == "__main__":
    main()
