"""Kills the parts of a server with tenants at random times, and compares the ledger with what was settled.

    python benchmarks/tenant_faults.py --requests 10000 --json benchmarks/results/amx/tenant_faults.json
    python benchmarks/tenant_faults.py --requests 2000 --runs 5 --redis redis-server

The server has four API processes; 64 clients send short requests of two tenants, one of which has a budget that runs
out. Meanwhile an API process, the engine, the whole server, or Redis is killed (SIGKILL) and starts again. At the end
the server is stopped. Then:

- no request is in the ledger twice, and each that is settled is there: what Redis has counted, without what is still
  reserved for requests that were killed, is the ledger's sum;
- nothing is overspent, by the ledger and by what clients have got.

`leases_of_killed_servers` stay charged: what such a server had spent of them is in the ledger, but not settled.
`unsettled` are answers that clients have got, and that are neither in the ledger nor settled: the server was killed
within the 0.05 s after them.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from results import parser, write
from servers import free_port, start

from penstock.config.tenants.keys import new_key
from penstock.weights.packaged import EMBEDDED

CLIENTS, PROCESSES = 64, 4
KILL_SECONDS = (0.3, 2.0)  # between two kills
READY_SECONDS = 120.0
LIMITS = {
    "steady": {"tokens_per_minute": 100_000_000, "tokens_per_month": 100_000_000},
    "spent": {"budget_per_month": 0.02},
}
FLAGS = "--threads 1 --max-num-seqs 64 --kv-cache-memory 64MiB --max-model-len 512 --access-log 0 --speculation off"
BODY = {"prompt": "import os\n", "max_tokens": 6, "ignore_eos": True}


class Site:
    """A server, and Redis if the quotas are there. Both start again when they have ended."""

    def __init__(self, folder: Path, redis: str) -> None:
        self.folder, self.redis = folder, redis
        self.keys: dict[str, str] = {}
        self.kills = Counter[str]()
        tenants = {}
        for name, limits in LIMITS.items():
            self.keys[name], key_id, stored = new_key()
            tenants[name] = {"limits": limits, "keys": [{"name": "k", "id": key_id, "hash": stored}]}
        prices = [{"since": "PRICES", "input": 1.0, "output": 5.0}]
        text = json.dumps({"tenants": tenants, "prices": prices}).replace('"PRICES"', "2020-01-01")
        (folder / "tenants.yaml").write_text(text)
        self.port, self.redis_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._store = self._start_redis() if redis else None
        self._server = self._start_server()

    def _start_redis(self) -> subprocess.Popen[bytes]:
        command = [self.redis, "--port", str(self.redis_port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        return start(command, stdout=subprocess.DEVNULL)

    def _start_server(self) -> subprocess.Popen[bytes]:
        flags = [*FLAGS.split(), "--port", str(self.port), "--api-processes", str(PROCESSES)]
        flags += ["--tenants", str(self.folder / "tenants.yaml"), "--state-dir", str(self.folder / "state")]
        flags += ["--quota-redis", f"redis://127.0.0.1:{self.redis_port}/0"] if self.redis else []
        with (self.folder / "log").open("ab") as sink:
            return start([sys.executable, "-m", "penstock", "serve", EMBEDDED, *flags], stdout=sink, stderr=sink)

    async def ready(self) -> None:
        async with aiohttp.ClientSession() as http:
            end = time.monotonic() + READY_SECONDS
            while time.monotonic() < end:
                with contextlib.suppress(aiohttp.ClientError):
                    async with http.get(self.url + "/readyz") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.05)
        sys.exit(f"the server did not start:\n{(self.folder / 'log').read_text()[-4000:]}")

    async def kill(self, source: random.Random) -> None:
        """Kills a part, and starts it again if the server does not do that itself."""
        part = source.choice(("api", "api", "engine", "server", *(["redis"] if self.redis else [])))
        self.kills[part] += 1
        if part == "redis" and self._store is not None:
            self._store.kill()
            self._store.wait()
            try:
                await asyncio.sleep(source.uniform(0.2, 2.0))
            finally:  # also if the load has ended meanwhile
                self._store = self._start_redis()
        elif part == "server":
            self._server.kill()
            self._server.wait()
            self._server = self._start_server()
            await self.ready()
        else:
            children = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children").read_text().split()
            pids = [int(pid) for pid in children if (b"api_process" in _command_line(pid)) == (part == "api")]
            with contextlib.suppress(IndexError, ProcessLookupError):
                os.kill(source.choice(pids), signal.SIGKILL)

    async def start_again(self) -> None:
        """Ends the server as an operator does, and starts it."""
        await asyncio.to_thread(self.stop)
        self._server = self._start_server()
        await self.ready()

    def stop(self) -> None:
        self._server.terminate()
        self._server.wait(60)

    def close(self) -> None:
        self._server.kill()
        if self._store is not None:
            self._store.terminate()
            self._store.wait(20)

    def counted(self, tenant: str, unit: str) -> tuple[int, int]:
        """Returns what Redis has counted of this month for requests that were settled, and for open leases."""
        import redis

        store = redis.Redis(port=self.redis_port)
        base = f"penstock:quota:{{{tenant}}}:"
        (key,) = store.keys(f"{base}used:{tenant}:{unit}:month:*")
        total, leased = int(store.get(key)), 0
        for name, text in store.hgetall(f"{base}open").items():
            for charged, amount, *_ in json.loads(text)[1]:
                if f"{base}used:{charged}".encode() == key:
                    total -= amount
                    leased += amount if name.startswith(b"lease:") else 0
        return total, leased


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Load:
    """Clients, and the ids of the answers that they got."""

    def __init__(self, site: Site, seed: int) -> None:
        self.answers: dict[str, set[str]] = {name: set() for name in LIMITS}
        self.statuses = Counter[str]()
        self.sent = 0
        self._site, self._random = site, random.Random(seed)

    async def run(self, requests: int) -> None:
        """Sends so many requests, while parts of the server are killed."""
        killing = asyncio.create_task(self._kill())
        try:
            await asyncio.gather(*(self._client(requests) for _ in range(CLIENTS)))
        finally:
            killing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killing

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(*KILL_SECONDS))
            await self._site.kill(self._random)

    async def _client(self, requests: int) -> None:
        while self.sent < requests:
            self.sent += 1
            # A connection of its own, so that the kernel chooses another process each time.
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
                await self.ask(http, self._random.choice(list(LIMITS)))

    async def ask(self, http: aiohttp.ClientSession, tenant: str) -> int:
        headers = {"authorization": f"Bearer {self._site.keys[tenant]}"}
        try:
            async with http.post(self._site.url + "/v1/completions", json=BODY, headers=headers) as answer:
                content = await answer.json()
                status = answer.status
        except aiohttp.ClientConnectorError:  # the server starts: there is nothing that could get lost
            self.sent -= 1
            await asyncio.sleep(0.2)
            return 0
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
            status = 0
        self.statuses[f"{tenant} {status}"] += 1
        if status == 200:
            self.answers[tenant].add(content["id"].removeprefix("cmpl-"))
        return status


def ledger_of(site: Site, tenant: str) -> tuple[set[str], int, int]:
    """Returns the ids of the tenant's rows, and their tokens and cost."""
    connection = sqlite3.connect(site.folder / "state" / "ledger.sqlite3")
    query = "SELECT id, prompt + output, nano FROM requests WHERE tenant = ?"
    rows = connection.execute(query, (tenant,)).fetchall()
    connection.close()
    assert len({name for name, *_ in rows}) == len(rows)
    return {name for name, *_ in rows}, sum(tokens for _, tokens, _ in rows), sum(nano for *_, nano in rows)


async def measure(site: Site, requests: int, seed: int) -> tuple[Load, float]:
    await site.ready()
    load, began = Load(site, seed), time.monotonic()
    await load.run(requests)
    seconds = time.monotonic() - began
    await asyncio.sleep(2.0)
    await site.ready()
    await site.start_again()
    async with aiohttp.ClientSession() as http:  # the first request of a tenant settles what a kill has left
        for tenant in LIMITS:
            for _ in range(4 * PROCESSES):
                await load.ask(http, tenant)
    await asyncio.to_thread(site.stop)
    return load, seconds


def checked(site: Site, load: Load, tenant: str) -> dict[str, Any]:
    """Returns the figures of a tenant. Raises AssertionError if something is lost or overspent."""
    ids, tokens, nano = ledger_of(site, tenant)
    lost = load.answers[tenant] - ids
    found: dict[str, Any] = {"rows": len(ids), "tokens": tokens, "answers": len(load.answers[tenant])}
    found["unsettled"] = len(lost)
    if site.redis:
        unit, spent = ("money", nano) if "budget_per_month" in LIMITS[tenant] else ("tokens", tokens)
        settled, leased = site.counted(tenant, unit)
        found |= {"settled": settled, "ledger": spent, "leases_of_killed_servers": leased}
        assert settled <= spent <= settled + leased, f"{tenant}: the ledger has {spent}, settled are {settled}"
    if (budget := LIMITS[tenant].get("budget_per_month")) is not None:
        found["budget_spent"] = nano / 1e9 / budget
        assert nano <= budget * 1e9, f"{tenant}: {nano} of {budget * 1e9} are spent"
    return found


def run(redis: str, requests: int, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), redis)
        try:
            load, seconds = asyncio.run(measure(site, requests, seed))
            tenants = {tenant: checked(site, load, tenant) for tenant in LIMITS}
        finally:
            site.close()
    result = {"seed": seed, "requests": load.sent, "seconds": round(seconds, 1), "kills": site.kills}
    return {**result, "statuses": load.statuses, "tenants": tenants}


def main() -> None:
    args = parser(__doc__)
    args.add_argument("--requests", type=int, default=10_000, help="of a run")
    args.add_argument("--runs", type=int, default=1, help="each with a server of its own, and the next seed")
    args.add_argument(
        "--redis", metavar="PATH", default="", help="the program redis-server; without, counters are in the server"
    )
    args.add_argument("--seed", type=int, default=0)
    given = args.parse_args()
    if given.redis and shutil.which(given.redis) is None:
        sys.exit(f"--redis is {given.redis}: there is no such program; run apt-get install redis-server")
    runs = [run(given.redis, given.requests, given.seed + number) for number in range(given.runs)]
    write({"store": "redis" if given.redis else "supervisor", "runs": runs}, given.json)


if __name__ == "__main__":
    main()
