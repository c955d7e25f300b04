"""Four API processes and Redis, parts of which are killed: nothing is overspent, and the ledger has what was settled.

`benchmarks/tenant_faults.py` does the same with 10,000 requests.
"""

import asyncio
import json
import os
import random
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes.test_api_processes import api_pids
from tests.e2e.processes.test_tenants import Place, send
from tests.e2e.server import serving
from tests.patience import PATIENCE, wait_for
from tests.redis_server import RedisServer, needs_redis, redis_servers

pytestmark = [needs_redis, pytest.mark.rare]
BUDGET = 1500
FILE = f"""
tenants:
  limited:
    limits: {{tokens_per_month: {BUDGET}}}
  free:
    limits: {{tokens_per_minute: 1000000, tokens_per_month: 1000000}}
"""
FLAGS = ("--api-processes", "4", "--max-num-seqs", "32", "--kv-cache-memory", "64MiB", "--max-model-len", "512")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    yield from redis_servers(tmp_path)


def settled(store: RedisServer, tenant: str) -> int:
    """The counter of the month, without what is still reserved."""
    base = f"penstock:quota:{{{tenant}}}:"
    (key,) = store.client.keys(f"{base}used:{tenant}:tokens:month:*")
    total = int(store.client.get(key))
    for text in store.client.hgetall(f"{base}open").values():
        total -= sum(row[1] for row in json.loads(text)[1] if f"{base}used:{row[0]}".encode() == key)
    return total


def in_the_ledger(place: Place, tenant: str) -> int:
    connection = sqlite3.connect(f"file:{place.folder / 'state' / 'ledger.sqlite3'}?mode=ro", uri=True, timeout=30)
    (tokens,) = connection.execute("SELECT SUM(prompt + output) FROM requests WHERE tenant = ?", (tenant,)).fetchone()
    connection.close()
    return int(tokens or 0)


async def load(place: Place, store: RedisServer, source: random.Random) -> Counter[tuple[str, int]]:
    """64 clients of two tenants, until the limited one has spent its tokens. An API process is killed, then Redis."""
    statuses = Counter[tuple[str, int]]()
    over = asyncio.Event()

    async def client() -> None:
        while not over.is_set():
            tenant = source.choice(("limited", "free"))
            statuses[tenant, await send(place, place.keys[tenant])] += 1
            if statuses["limited", 429] >= 20:
                over.set()

    clients = [asyncio.create_task(client()) for _ in range(64)]
    await asyncio.sleep(0.7)
    os.kill(source.choice(api_pids(place.server)), signal.SIGKILL)
    await asyncio.sleep(0.5)
    store.kill()
    await asyncio.sleep(0.7)
    store.start()
    await asyncio.wait_for(over.wait(), PATIENCE)
    await asyncio.gather(*clients)
    return statuses


async def test_parts_that_are_killed_overspend_and_lose_nothing(store: RedisServer, tmp_path: Path) -> None:
    place = Place(tmp_path, FILE, ("limited", "free"))
    flags = (*FLAGS, "--tenants", str(place.file), "--state-dir", str(tmp_path / "state"))
    with serving(tmp_path / "log", *flags, "--quota-redis", store.url) as place.server:
        statuses = await load(place, store, random.Random(3))
        assert statuses["limited", 200] and statuses["free", 200]
        wait_for(lambda: len(api_pids(place.server)) == 4, "the new process")
        log = (tmp_path / "log").read_text()
        assert "this server spends what it has leased" in log
        # The new process settles what the ledger has of the one that was killed. The leases go back at the end.
        async with asyncio.timeout(PATIENCE):
            for tenant in ("limited", "free"):
                await asyncio.gather(*(send(place, place.keys[tenant]) for _ in range(24)))
    for tenant in ("limited", "free"):
        assert settled(store, tenant) == in_the_ledger(place, tenant)
    assert in_the_ledger(place, "limited") <= BUDGET
