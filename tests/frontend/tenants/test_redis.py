"""Quotas in Redis: several servers together overspend nothing, and while Redis is away each spends its lease only."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.errors import APIError
from penstock.frontend.tenants import redis_quotas
from penstock.frontend.tenants.ledger import FILE, LedgerRow
from penstock.frontend.tenants.quotas import LIFE, Amounts, Settlement
from penstock.frontend.tenants.redis_quotas import LEASE_MINUTES, RedisBooks
from tests.frontend.tenants.conftest import TenantSite
from tests.patience import PATIENCE
from tests.redis_server import RedisServer, needs_redis, redis_servers

pytestmark = needs_redis


class NoLedger:
    """Books that have no rows. `written` returns when `disk` is set."""

    def __init__(self) -> None:
        self.disk = asyncio.Event()
        self.disk.set()

    async def written(self, row: LedgerRow) -> None:
        await self.disk.wait()

    async def close(self) -> None: ...


def quotas(server: RedisServer, unsettled: list[Settlement] | None = None) -> RedisBooks:
    return RedisBooks(server.url, NoLedger(), unsettled or [])  # type: ignore[arg-type]


async def settle(store: RedisBooks, name: str, tokens: int) -> None:
    await store.finish(None, [Settlement(name, "t", Amounts(tokens))])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    yield from redis_servers(tmp_path)


async def test_four_servers_overspend_nothing(server: RedisServer) -> None:
    """64 clients of four servers, until the budget is spent. Each request settles less than it reserved."""
    stores = [quotas(server) for _ in range(4)]
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
            await settle(store, name, 7)
            await settle(store, name, 0)

    await asyncio.gather(*(client(number) for number in range(64)))
    assert 3000 - 20 - 7 < spent <= 3000
    assert counts["tokens_per_month"] > 0
    left = (await stores[0].reserve("last", "t", limits, Amounts(0))).left["tokens_per_month"][1]
    assert left == 3000 - spent
    for store in stores:
        await store.close()


async def test_what_is_never_settled_is_given_back(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = quotas(server)
    limits = QuotaLimits(tokens_per_month=100, concurrent_requests=1)
    monkeypatch.setattr(redis_quotas, "LIFE", 0.2)
    assert not (await store.reserve("lost", "t", limits, Amounts(90))).refused
    assert (await store.reserve("next", "t", limits, Amounts(20))).refused == "concurrent_requests"
    await asyncio.sleep(0.3)
    assert not (await store.reserve("later", "t", limits, Amounts(20))).refused
    assert LIFE > 60
    await store.close()


async def test_without_redis_a_server_spends_its_lease_and_nothing_more(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Two servers have one part in 50 of 5,000 tokens each. What they spent is counted when Redis is back."""
    stores = [quotas(server), quotas(server)]
    limits = QuotaLimits(tokens_per_minute=5000, tokens_per_month=1_000_000)
    for number, store in enumerate(stores):
        assert not (await store.reserve(f"before-{number}", "t", limits, Amounts(50))).refused
    server.stop()
    settling = []
    for number, store in enumerate(stores):
        for name, tokens in ((f"leased-{number}", 60), (f"more-{number}", 40)):
            assert not (await store.reserve(name, "t", limits, Amounts(tokens))).refused
            settling.append(asyncio.create_task(settle(store, name, tokens - 5)))
            await asyncio.sleep(0)  # it is settled in the lease; Redis is told later
        assert "this server spends what it has leased" in caplog.text
        with pytest.raises(APIError) as raised:
            await store.reserve(f"beyond-{number}", "t", limits, Amounts(60))
        assert (raised.value.status, raised.value.code) == (503, "quota_store_unavailable")
        with pytest.raises(APIError):
            await store.reserve("another tenant", "u", limits, Amounts(1))
    settling.append(asyncio.create_task(settle(stores[0], "before-0", 5)))
    await asyncio.sleep(0.2)
    server.start()
    await asyncio.wait_for(asyncio.gather(*settling), PATIENCE)
    for number, store in enumerate(stores):
        async with asyncio.timeout(PATIENCE):
            while True:  # until it is time to try again
                try:
                    assert not (await store.reserve(f"after-{number}", "t", limits, Amounts(10))).refused
                    break
                except APIError:
                    await asyncio.sleep(0.1)
        await store.close()
    assert spent(server) == 5 + 50 + 2 * (55 + 35) + 2 * 10


def spent(server: RedisServer) -> int:
    """The counter of the month."""
    (key,) = server.client.keys("penstock:quota:{t}:used:t:tokens:month:*")
    return int(server.client.get(key))


async def test_leases_are_spent_when_nothing_else_is_left(server: RedisServer) -> None:
    """So that a limit can be used up to its end, by all servers together."""
    stores = [quotas(server) for _ in range(4)]
    limits, done = QuotaLimits(requests_per_minute=100), 0
    for turn in range(40):
        for number, store in enumerate(stores):
            done += not (await store.reserve(f"{number}-{turn}", "t", limits, Amounts(1))).refused
    assert 100 - 4 < done <= 100 or done > 100, "a minute may end meanwhile"
    for store in stores:
        await store.close()


async def test_the_lease_of_a_server_that_was_killed_stays_charged(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_quotas, "LIFE", 0.2)
    limits = QuotaLimits(tokens_per_month=50_000)
    killed, other = quotas(server), quotas(server)
    assert not (await killed.reserve("a", "t", limits, Amounts(100))).refused
    await asyncio.sleep(0.3)
    assert not (await other.reserve("b", "t", limits, Amounts(100))).refused
    assert spent(server) == 10 + 10 + 100, "the request is given back, and the lease is not"
    assert LEASE_MINUTES * 60 < LIFE
    await other.close()


async def test_a_settlement_follows_the_row_of_the_ledger(server: RedisServer) -> None:
    """A server that is killed before Redis has the settlement sends it when it starts again, once."""
    limits = QuotaLimits(tokens_per_month=1000)
    killed = quotas(server)
    for name in ("row-0", "row-1", "later-0"):
        await killed.reserve(name, "t", limits, Amounts(100))
    killed._books.disk.clear()  # type: ignore[attr-defined]
    row = LedgerRow(id="row", began=0.0, tenant="t", key="", model="", version="", wire="")
    finishing = asyncio.create_task(killed.finish(row, [Settlement("row-0", "t", Amounts(30))]))
    await asyncio.sleep(0.1)
    assert spent(server) == 300
    finishing.cancel()
    await killed._redis.aclose()
    rows = [Settlement("row", "t", Amounts(42)), Settlement("older", "t", Amounts(7))]
    sibling = RedisBooks(server.url, NoLedger(), rows, 1)  # type: ignore[arg-type]
    await sibling.reserve("its-0", "t", limits, Amounts(10))
    assert spent(server) == 300 + 10, "it leaves what another process has reserved"
    await sibling.close()
    again = quotas(server, rows)
    await again.reserve("new-0", "t", limits, Amounts(10))
    assert spent(server) == 42 + 100 + 10 + 10
    await again.close()


async def test_a_server_with_redis(server: RedisServer, tenant_site: Callable[..., TenantSite]) -> None:
    limits = {"tokens_per_month": 1000, "concurrent_requests": 1}
    site = tenant_site({"a": {"limits": limits}, "b": {}}, config={"quota_redis": server.url})
    for _ in range(2):  # the second one follows at once, with one request at a time
        assert (await site.ask("a/default")).status_code == 200
    await asyncio.sleep(0.5)
    connection = sqlite3.connect(site.folder / "state" / FILE)
    used = connection.execute("SELECT SUM(prompt + output), COUNT(*) FROM requests WHERE status = 200").fetchone()
    connection.close()
    (key,) = server.client.keys("penstock:quota:{a}:used:a:tokens:month:*")
    assert (int(server.client.get(key)), 2) == used
    server.stop()
    assert (await site.ask("a/default")).status_code == 503, "its limits are too small for a lease"
    assert (await site.ask("b/default")).status_code == 200, "it has no limits"
    server.start()
