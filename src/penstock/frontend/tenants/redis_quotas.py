"""Quotas that several servers share, in Redis (extra `redis`).

One script does everything, so that no two servers can both spend what is left. The time is that of Redis: servers with
wrong clocks count in the same windows.

Each server also holds a lease of each tenant that it serves: a small part of the tenant's limits, which the script has
reserved as it reserves for requests. While Redis does not answer, and when a limit is used up but for leases, a server
spends its lease and nothing more.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.errors import APIError
from penstock.frontend.tenants.books import Books
from penstock.frontend.tenants.ledger import LedgerRow
from penstock.frontend.tenants.quotas import (
    LIFE,
    RATES,
    Amounts,
    Charge,
    QuotaDecision,
    Quotas,
    Settlement,
    charges_of,
    left_of,
    refusal,
)
from penstock.messages import EngineError
from penstock.tasks import spawn

SECONDS = 2.0  # for an answer of Redis
LEASE_MINUTES = 10  # that a lease covers
RENEW_SECONDS = 60.0  # after which it is given back and a new one is taken
SETTLING_SECONDS = 0.2  # in which a request that has just ended gives its place back: the ledger gets its row first
RETRY_SECONDS = 1.0  # between attempts to reach Redis, after one that failed
_PARTS = {"minute": 50, "day": 500, "month": 5000, "concurrent": 50}  # a lease has one part in so many of a limit
_PREFIX = "penstock:quota:"
_CLOCK_SECONDS = 60.0  # between comparisons of the clocks
_LEDGER_SECONDS = 30.0  # that a settlement waits for the ledger
_LAST_SECONDS = 2.0  # for settlements when the server is stopped
_log = logging.getLogger("penstock.tenants")
_Row = tuple[str, int, str, int, int]

# KEYS[1]: the tenant's counters. KEYS[2]: its open reservations, as JSON by id. KEYS[3]: their ends. KEYS[4]: those
# that count as requests at a time. A reservation is [requests at a time, [[key, amount, unit, seconds to keep], ...]].
# What a lease had is not given back when its life is over: its server was killed, and may have spent it.
_SCRIPT = """
local function settle(id, used)
  local held = redis.call('HGET', KEYS[2], id)
  if not held then return 0 end
  held = cjson.decode(held)
  for _, c in ipairs(held[2]) do
    if used and c[3] ~= 'requests' and redis.call('EXISTS', KEYS[1] .. c[1]) == 1 then
      redis.call('INCRBY', KEYS[1] .. c[1], string.format('%d', (used[c[3]] or 0) - c[2]))
    end
  end
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  for place = 1, held[1] do redis.call('SREM', KEYS[4], id .. ' ' .. place) end
  return 1
end
if ARGV[1] == 'settle' then return settle(ARGV[2], cjson.decode(ARGV[3])) end
local id, now, life, most = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local counts, charges = unpack(cjson.decode(ARGV[6]))
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do
  if string.sub(old, 1, 6) == 'lease:' then settle(old, nil) else settle(old, {}) end
end
local used = {}
for i, c in ipairs(charges) do used[i] = tonumber(redis.call('GET', KEYS[1] .. c[1]) or '0') end
if redis.call('HEXISTS', KEYS[2], id) == 0 then
  if most >= 0 and counts > 0 and redis.call('SCARD', KEYS[4]) + counts > most then return {-1} end
  for i, c in ipairs(charges) do
    if used[i] + c[2] > c[5] then return {i, string.format('%d', used[i])} end
  end
  for i, c in ipairs(charges) do
    used[i] = used[i] + c[2]
    redis.call('INCRBY', KEYS[1] .. c[1], string.format('%d', c[2]))
    redis.call('EXPIRE', KEYS[1] .. c[1], c[4])
  end
  redis.call('HSET', KEYS[2], id, ARGV[6])
  redis.call('ZADD', KEYS[3], now + life, id)
  for place = 1, counts do redis.call('SADD', KEYS[4], id .. ' ' .. place) end
end
local answer = {0}
for i, u in ipairs(used) do answer[i + 1] = string.format('%d', u) end
return answer
"""


class _Lease:
    """A part of a tenant's limits that this server may spend by itself."""

    def __init__(self, limits: QuotaLimits, now: float) -> None:
        self.name, self.limits = f"lease:{secrets.token_hex(8)}", limits
        self.renewal = now + RENEW_SECONDS
        self.ends = 0.0  # until Redis has granted it
        self.spent = Amounts()
        self.open = 0  # requests that have reserved from it, and are not settled
        self._quotas = Quotas()

    def reserve(self, name: str, amounts: Amounts, now: float) -> QuotaDecision | None:
        """Returns None if the lease is not enough."""
        if now >= self.ends:
            return None
        decision = self._quotas.reserve(name, "", self.limits, amounts, now)
        if decision.refused:
            return None
        self.open += 1
        return decision

    def settle(self, name: str, used: Amounts) -> None:
        self._quotas.settle(name, used)
        self.open -= 1
        self.spent = Amounts(self.spent.tokens + used.tokens, self.spent.money + used.money)
        self.renewal = 0.0  # so that Redis gets to know it as soon as it answers


class RedisBooks:
    """Books whose counters are in Redis. All else is as that of the `books` of this server."""

    def __init__(self, url: str, books: Books, unsettled: Iterable[Settlement] = (), process: int = 0) -> None:
        """Reservations that an earlier process with this number has left open for `unsettled` rows of the ledger, by
        their ids, are settled."""
        from redis import asyncio as redis

        self._redis = redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
        self._script = self._redis.register_script(_SCRIPT)
        self._books, self._prefix = books, f"{process}/"
        self._unsettled: dict[str, dict[str, Amounts]] = {}  # by tenant and row
        for each in unsettled:
            self._unsettled.setdefault(each.tenant, {})[each.name] = each.used
        self._tasks: set[asyncio.Task[None]] = set()
        self._leases: dict[str, _Lease] = {}  # by tenant
        self._leased: dict[str, _Lease] = {}  # by the name of a reservation
        self._ahead = 0.0  # of Redis's clock before time.monotonic()
        self._compared = -_CLOCK_SECONDS
        self._retry = 0.0  # when Redis is tried again, on time.monotonic(); 0: it answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._books, name)

    async def now(self) -> float:
        """Returns the time of Redis's clock, in seconds since the epoch. While Redis does not answer it goes on."""
        if time.monotonic() - self._compared >= _CLOCK_SECONDS:
            with contextlib.suppress(APIError):
                seconds, micros = await self._call(self._redis.time)
                self._compared = time.monotonic()
                self._ahead = seconds + micros / 1e6 - self._compared
        return time.monotonic() + self._ahead

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        name, now = self._prefix + name, await self.now()
        charges = charges_of(tenant, limits, amounts, now)
        rows = [_row(charge, charge.amount, charge.most, now) for charge in charges]
        try:
            await self._settle_rows(tenant)
            await self._renew_lease(tenant, limits, now)
            code, *used = await self._reserve(name, tenant, limits, amounts.requests, rows, now)
            if code < 0:
                await asyncio.sleep(SETTLING_SECONDS)
                code, *used = await self._reserve(name, tenant, limits, amounts.requests, rows, now)
        except APIError:
            if (decision := self._from_lease(name, tenant, amounts, now)) is None:
                raise
            return decision
        if not code:
            return QuotaDecision(now=now, left=left_of(charges, used, now))
        if code < 0:
            refused = QuotaDecision(now=now, refused="concurrent_requests", retry_after=1.0)
        else:
            refused = refusal(charges[code - 1], used[0], now)
        return self._from_lease(name, tenant, amounts, now) or refused

    def finish(self, row: LedgerRow | None, settled: Sequence[Settlement]) -> None:
        """See Books. Redis outlives this server: it gets a settlement only when the ledger has the row."""
        if not settled:
            self._books.finish(row, ())
        else:
            spawn(self._tasks, self._settle_all(settled, None if row is None else self._books.written(row)))

    async def _settle_all(self, settled: Sequence[Settlement], written: Awaitable[object] | None) -> None:
        if written is not None:
            try:
                async with asyncio.timeout(_LEDGER_SECONDS):
                    await written
            except TimeoutError:
                pass  # the disk is full: the row waits in memory, and the tenant's place must not
            except EngineError:
                return  # the supervisor has ended, perhaps without the row
        for each in settled:
            name, used = self._prefix + each.name, each.used
            if (lease := self._leased.pop(name, None)) is not None:
                lease.settle(name, used)
                used = Amounts()  # Redis may have reserved it, too, with an answer that was lost
            await self._settle_patiently(each.tenant, name, used)

    async def close(self) -> None:
        """Settles what is left, and gives the leases back."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_SECONDS)
        self._retry = 0.0  # there is no later time to try again
        for tenant, lease in self._leases.items():
            with contextlib.suppress(APIError):
                await self._settle(tenant, lease.name, lease.spent)
        await self._redis.aclose()
        await self._books.close()

    def _from_lease(self, name: str, tenant: str, amounts: Amounts, now: float) -> QuotaDecision | None:
        if (lease := self._leases.get(tenant)) is None or (decision := lease.reserve(name, amounts, now)) is None:
            return None
        self._leased[name] = lease
        return decision

    async def _renew_lease(self, tenant: str, limits: QuotaLimits, now: float) -> None:
        """Takes a lease, and gives the last one back, if it is time and that one is not in use. Raises APIError."""
        old = self._leases.get(tenant)
        if old is not None and (now < old.renewal or old.open):
            return
        await self._call(self._redis.ping)  # while Redis is away, the old lease is kept and spent
        if self._leases.get(tenant) is not old or (old is not None and old.open):
            return
        part = _lease_limits(limits)
        new = self._leases[tenant] = _Lease(part or limits, now)  # at once: others do not take one as well
        if old is not None:
            await self._settle(tenant, old.name, old.spent)
        if part is None:
            return
        rows, ends = list[_Row](), now + 60 * (LEASE_MINUTES - 1)
        for minutes in range(LEASE_MINUTES):
            whole, parts = (charges_of(tenant, each, Amounts(), now + 60 * minutes) for each in (limits, part))
            for charge, leased in zip(whole, parts, strict=True):
                by_minute = charge.limit.endswith("minute")
                if by_minute or not minutes:
                    rows.append(_row(charge, leased.most, charge.most, now))
                    ends = ends if by_minute else min(ends, charge.ends)
        code, *_ = await self._reserve(new.name, tenant, limits, part.concurrent_requests or 0, rows, now)
        new.ends = 0.0 if code else ends

    async def _settle_rows(self, tenant: str) -> None:
        """Settles what the ledger had at the start, for reservations that are still open. Raises APIError."""
        if (rows := self._unsettled.pop(tenant, None)) is None:
            return
        try:
            for name in map(bytes.decode, await self._call(lambda: self._redis.hkeys(_keys(tenant)[1]))):
                row = name.removeprefix(self._prefix).rpartition("-")[0]
                if row in rows and name.startswith(self._prefix):
                    await self._settle(tenant, name, rows[row])
                    rows[row] = Amounts()  # a request with several reservations has one row
        except APIError:
            self._unsettled[tenant] = rows
            raise

    async def _reserve(
        self, name: str, tenant: str, limits: QuotaLimits, requests: int, rows: Sequence[_Row], now: float
    ) -> list[int]:
        """Returns the script's answer: 0 and the counters; or -1, or the number of the limit and its counter."""
        most = -1 if limits.concurrent_requests is None else limits.concurrent_requests
        arguments: list[Any] = ["reserve", name, now, LIFE, most, msgspec.json.encode([requests, rows])]
        answer = await self._call(lambda: self._script(keys=_keys(tenant), args=arguments))
        return [int(each) for each in answer]

    async def _settle(self, tenant: str, name: str, used: Amounts) -> None:
        given = msgspec.json.encode({"tokens": used.tokens, "money": used.money})
        await self._call(lambda: self._script(keys=_keys(tenant), args=["settle", name, given]))

    async def _settle_patiently(self, tenant: str, name: str, used: Amounts) -> None:
        """Tries again until Redis answers, or the reservation's life is over."""
        ends = time.monotonic() + LIFE
        while time.monotonic() < ends:
            with contextlib.suppress(APIError):
                await self._settle(tenant, name, used)
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _call(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Returns what Redis answers. Raises APIError 503; after a failure at once, until it is time to try again."""
        from redis.exceptions import RedisError

        error: Exception | None = None
        if time.monotonic() >= self._retry:
            try:
                answer = await command()
            except (RedisError, OSError, TimeoutError) as failure:
                error = failure
                if not self._retry:
                    _log.error(
                        "Redis does not answer: until it does, this server spends what it has leased of the limits of "
                        "its tenants, and refuses what is beyond that: %s",
                        failure,
                    )
                self._retry = time.monotonic() + RETRY_SECONDS
                # Other idle connections are as old: each would be another failure after Redis has come back.
                await asyncio.gather(self._redis.connection_pool.disconnect(False), return_exceptions=True)
            else:
                if self._retry:
                    _log.info("Redis answers again")
                self._retry = 0.0
                return answer
        message = "the quotas of this key cannot be checked, as their store does not answer; try again later"
        raise APIError(503, message, code="quota_store_unavailable", retry_after=2) from error


def _lease_limits(limits: QuotaLimits) -> QuotaLimits | None:
    """Returns the part of limits that a lease has. None if that is nothing of one of them."""
    periods = {limit: period for limit, _, period in RATES} | {"concurrent_requests": "concurrent"}
    given = {limit: most for limit in periods if (most := getattr(limits, limit)) is not None}
    part = {limit: type(most)(most / _PARTS[periods[limit]]) for limit, most in given.items()}
    return QuotaLimits(**part) if all(part.values()) else None


def _row(charge: Charge, amount: int, most: int, now: float) -> _Row:
    return charge.key, amount, charge.unit, int(charge.ends - now) + 120, most


def _keys(tenant: str) -> list[str]:
    base = f"{_PREFIX}{{{tenant}}}:"  # the braces keep a tenant's keys on one node of a cluster
    return [f"{base}used:", f"{base}open", f"{base}ends", f"{base}running"]
