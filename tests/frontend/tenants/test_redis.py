"""Quotas in Redis: several servers together overspend nothing, and none spends while Redis is away.

Needs redis-server, of Debian's package of the same name.
"""

import asyncio
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.errors import APIError
from penstock.frontend.tenants import redis_quotas
from penstock.frontend.tenants.quotas import LIFE, Amounts
from penstock.frontend.tenants.redis_quotas import RedisQuotas
from tests.frontend.tenants.conftest import TenantSite
from tests.ports import free_port

redis = pytest.importorskip("redis")
pytestmark = pytest.mark.skipif(shutil.which("redis-server") is None, reason="apt-get install redis-server")


class RedisServer:
    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        client = redis.Redis(port=self.port)
        for _ in range(500):
            try:
                client.ping()
                return
            except redis.exceptions.RedisError:
                time.sleep(0.02)
        raise AssertionError("redis-server did not start")

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path)
    yield made
    made.stop()


async def test_four_servers_overspend_nothing(server: RedisServer) -> None:
    """64 clients of four servers, until the budget is spent. Each request settles less than it reserved."""
    stores = [RedisQuotas(server.url) for _ in range(4)]
    limits = QuotaLimits(tokens_per_month=3000, concurrent_requests=40)
    spent, counts, most = 0, Counter[str](), 0

    async def client(number: int) -> None:
        nonlocal spent, most
        store = stores[number % 4]
        for turn in range(20):
            name = f"{number}-{turn}"
            decision = await store.reserve(name, "t", limits, Amounts(20))
            counts[decision.refused] += 1
            if decision.refused:
                continue
            again = await store.reserve(name, "t", limits, Amounts(20))
            assert not again.refused
            spent += 7
            await store.settle(name, "t", Amounts(7))
            await store.settle(name, "t", Amounts(0))

    await asyncio.gather(*(client(number) for number in range(64)))
    assert 3000 - 20 - 7 < spent <= 3000
    assert counts["tokens_per_month"] > 0
    left = (await stores[0].reserve("last", "t", limits, Amounts(0))).left["tokens_per_month"][1]
    assert left == 3000 - spent
    for store in stores:
        await store.close()


async def test_what_is_never_settled_is_given_back(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = redis_quotas.RedisQuotas(server.url)
    limits = QuotaLimits(tokens_per_month=100, concurrent_requests=1)
    monkeypatch.setattr(redis_quotas, "LIFE", 0.2)
    assert not (await store.reserve("lost", "t", limits, Amounts(90))).refused
    assert (await store.reserve("next", "t", limits, Amounts(20))).refused == "concurrent_requests"
    await asyncio.sleep(0.3)
    assert not (await store.reserve("later", "t", limits, Amounts(20))).refused
    assert LIFE > 60
    await store.close()


async def test_without_redis_nothing_is_spent_and_it_goes_on_when_redis_is_back(server: RedisServer) -> None:
    store = RedisQuotas(server.url)
    limits = QuotaLimits(tokens_per_month=100)
    assert not (await store.reserve("a", "t", limits, Amounts(50))).refused
    server.stop()
    with pytest.raises(APIError) as raised:
        await store.reserve("b", "t", limits, Amounts(10))
    assert (raised.value.status, raised.value.code) == (503, "quota_store_unavailable")
    settling = asyncio.create_task(store.settle("a", "t", Amounts(5)))
    await asyncio.sleep(0.2)
    server.start()
    await asyncio.wait_for(settling, 20)
    decision = await store.reserve("c", "t", limits, Amounts(90))
    assert not decision.refused and decision.left["tokens_per_month"][1] == 100 - 5 - 90
    await store.close()


async def test_a_server_with_redis(server: RedisServer, tenant_site: Callable[..., TenantSite]) -> None:
    site = tenant_site({"a": {"limits": {"requests_per_minute": 2}}, "b": {}}, config={"quota_redis": server.url})
    assert [(await site.ask("a/default")).status_code for _ in range(3)] in ([200, 200, 429], [200, 200, 200])
    server.stop()
    assert (await site.ask("a/default")).status_code in (429, 503)
    assert (await site.ask("b/default")).status_code == 200, "it has no limits"
    server.start()
