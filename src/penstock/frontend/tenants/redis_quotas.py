"""Quotas that several servers share, in Redis (extra `redis`).

One script does everything, so that no two servers can both spend what is left. The time is that of Redis: servers with
wrong clocks count in the same windows. While Redis cannot be reached, no server has a lease to spend: requests of
tenants with limits are refused.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any, cast

import msgspec

from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.errors import APIError
from penstock.frontend.tenants.quotas import LIFE, Amounts, QuotaDecision, charges_of, left_of, refusal

SECONDS = 2.0  # for an answer of Redis
_PREFIX = "penstock:quota:"
_CLOCK_SECONDS = 60.0  # between comparisons of the clocks
_log = logging.getLogger("penstock.tenants")

# KEYS[1]: the tenant's counters. KEYS[2]: its open reservations, as JSON by id. KEYS[3]: their ends. KEYS[4]: those
# that count as requests at a time. A reservation is [[key, amount, unit, seconds to keep], ...].
_SCRIPT = """
local function settle(id, used)
  local held = redis.call('HGET', KEYS[2], id)
  if not held then return 0 end
  for _, c in ipairs(cjson.decode(held)) do
    if c[3] ~= 'requests' and redis.call('EXISTS', KEYS[1] .. c[1]) == 1 then
      redis.call('INCRBY', KEYS[1] .. c[1], string.format('%d', (used[c[3]] or 0) - c[2]))
    end
  end
  redis.call('HDEL', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  redis.call('SREM', KEYS[4], id)
  return 1
end
if ARGV[1] == 'settle' then return settle(ARGV[2], cjson.decode(ARGV[3])) end
local id, now, life = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local most, counts, charges = tonumber(ARGV[5]), tonumber(ARGV[6]), cjson.decode(ARGV[7])
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, 100)) do settle(old, {}) end
local used = {}
for i, c in ipairs(charges) do used[i] = tonumber(redis.call('GET', KEYS[1] .. c[1]) or '0') end
if redis.call('HEXISTS', KEYS[2], id) == 0 then
  if most >= 0 and counts > 0 and redis.call('SCARD', KEYS[4]) >= most then return {-1} end
  for i, c in ipairs(charges) do
    if used[i] + c[2] > c[5] then return {i, string.format('%d', used[i])} end
  end
  for i, c in ipairs(charges) do
    used[i] = used[i] + c[2]
    redis.call('INCRBY', KEYS[1] .. c[1], string.format('%d', c[2]))
    redis.call('EXPIRE', KEYS[1] .. c[1], c[4])
  end
  redis.call('HSET', KEYS[2], id, ARGV[7])
  redis.call('ZADD', KEYS[3], now + life, id)
  if counts > 0 then redis.call('SADD', KEYS[4], id) end
end
local answer = {0}
for i, u in ipairs(used) do answer[i + 1] = string.format('%d', u) end
return answer
"""


class RedisQuotas:
    """A QuotaStore in Redis."""

    def __init__(self, url: str) -> None:
        """Raises ValueError if the package or the URL is missing."""
        try:
            from redis import asyncio as redis
        except ImportError:
            raise ValueError(
                f"--quota-redis is {url}, but redis is not installed: run pip install 'penstock[redis]'"
            ) from None
        self._redis = redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)
        self._script = self._redis.register_script(_SCRIPT)
        self._ahead = 0.0  # of Redis's clock before time.monotonic()
        self._compared = -_CLOCK_SECONDS
        self._down = False

    async def now(self) -> float:
        """Returns the time of Redis's clock, in seconds since the epoch. Raises APIError 503."""
        if time.monotonic() - self._compared >= _CLOCK_SECONDS:
            seconds, micros = cast(tuple[int, int], await self._answer(self._redis.time()))
            self._compared = time.monotonic()
            self._ahead = seconds + micros / 1e6 - self._compared
        return time.monotonic() + self._ahead

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        """See QuotaStore."""
        now = await self.now()
        charges = charges_of(tenant, limits, amounts, now)
        rows = [(c.key, c.amount, c.unit, int(c.ends - now) + 120, c.most) for c in charges]
        most = -1 if limits.concurrent_requests is None else limits.concurrent_requests
        arguments: list[Any] = ["reserve", name, now, LIFE, most, amounts.requests, msgspec.json.encode(rows)]
        answer = cast(list[Any], await self._answer(self._script(keys=_keys(tenant), args=arguments)))
        code, *used = (int(each) for each in answer)
        if code < 0:
            return QuotaDecision(refused="concurrent_requests", retry_after=1.0)
        if code:
            return refusal(charges[code - 1], used[0], now)
        return QuotaDecision(left=left_of(charges, used, now))

    async def settle(self, name: str, tenant: str, used: Amounts) -> None:
        """See QuotaStore. It is tried again until Redis answers, or the reservation's life is over."""
        given = msgspec.json.encode({"tokens": used.tokens, "money": used.money})
        ends, wait = time.monotonic() + LIFE, 0.1
        while time.monotonic() < ends:
            try:
                await self._answer(self._script(keys=_keys(tenant), args=["settle", name, given]))
            except APIError:
                await asyncio.sleep(wait)
                wait = min(2 * wait, 10.0)
            else:
                return

    async def close(self) -> None:
        await self._redis.aclose()

    async def _answer(self, reply: Awaitable[Any]) -> Any:
        from redis.exceptions import RedisError

        try:
            answer = await reply
        except (RedisError, OSError, TimeoutError) as error:
            if not self._down:
                _log.error("Redis does not answer, requests of tenants with limits are refused: %s", error)
            self._down = True
            message = "the quotas of this key cannot be checked, as their store does not answer; try again later"
            raise APIError(503, message, code="quota_store_unavailable", retry_after=2) from error
        if self._down:
            self._down = False
            _log.info("Redis answers again")
        return answer


def _keys(tenant: str) -> list[str]:
    base = f"{_PREFIX}{{{tenant}}}:"  # the braces keep a tenant's keys on one node of a cluster
    return [f"{base}used:", f"{base}open", f"{base}ends", f"{base}running"]
