"""Limits of tenants over time: what a request may use is reserved before it starts, and settled when it has ended.

Pure: time is an argument. A window is part of its counter's key, so no counter is ever reset. All counts are integers;
money is in billionths of the currency.
"""

import datetime
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from penstock.config.tenants.entries import QuotaLimits

LIFE = 3600.0  # seconds after which what a reservation holds is given back if it was never settled
NANO = 1_000_000_000  # a unit of the currency
_SWEEP = 4096  # counters and reservations, beyond which old ones are looked for
_SWEEP_SECONDS = 10.0  # between such looks

Unit = Literal["requests", "tokens", "money"]
Period = Literal["minute", "day", "month"]
# The limit's field, what it counts, and its window.
RATES: tuple[tuple[str, Unit, Period], ...] = (
    ("requests_per_minute", "requests", "minute"),
    ("tokens_per_minute", "tokens", "minute"),
    ("tokens_per_day", "tokens", "day"),
    ("tokens_per_month", "tokens", "month"),
    ("budget_per_month", "money", "month"),
)


class Amounts(msgspec.Struct, frozen=True, array_like=True):
    """What a request uses, or may use at most."""

    tokens: int = 0
    money: int = 0  # billionths
    requests: int = 1  # 0 for the further prompts of a request that has several


class Settlement(msgspec.Struct, frozen=True, array_like=True):
    """What a request has used of what was reserved for it."""

    name: str  # of the reservation
    tenant: str
    used: Amounts


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """One counter that a reservation adds to."""

    limit: str  # field of QuotaLimits
    key: str  # of the counter: the tenant, what is counted and the window
    unit: Unit
    most: int
    amount: int
    ends: float  # of the window, in seconds since the epoch


class QuotaDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a request may start. `left` has (most, what is left, seconds to the window's end) by limit."""

    now: float  # in seconds since the epoch
    refused: str = ""  # the limit that it would exceed; "": it may start
    retry_after: float = 0.0  # seconds; below 0: the request is larger than the limit
    left: dict[str, tuple[int, int, float]] = {}


class Reservation(msgspec.Struct):
    """What is held for a request that has not been settled."""

    tenant: str
    charges: tuple[Charge, ...]
    expires: float
    requests: int  # of the requests at a time


class Quotas:
    """The counters of one process, or of one server."""

    def __init__(self) -> None:
        self.used: dict[str, int] = {}  # the counters by key
        self._ends: dict[str, float] = {}  # of the counters' windows
        self._open: dict[str, Reservation] = {}
        self._running: dict[str, int] = {}  # open reservations by tenant
        self._swept = 0.0  # when old counters were last looked for

    def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts, now: float) -> QuotaDecision:
        """Reserve what a request may use. `name` is its id: a second call with it reserves nothing more."""
        if len(self.used) + len(self._open) > _SWEEP and now >= self._swept + _SWEEP_SECONDS:
            self._sweep(now)
        charges = charges_of(tenant, limits, amounts, now)
        if name not in self._open:
            if (most := limits.concurrent_requests) is not None and amounts.requests:
                if self._running.get(tenant, 0) >= most:
                    self._sweep(now)
                if self._running.get(tenant, 0) >= most:
                    return QuotaDecision(now=now, refused="concurrent_requests", retry_after=1.0)
            for charge in charges:
                used = self.used.get(charge.key, 0)
                if used + charge.amount > charge.most:
                    return refusal(charge, used, now)
            for charge in charges:
                self.used[charge.key] = self.used.get(charge.key, 0) + charge.amount
                self._ends[charge.key] = charge.ends
            self._open[name] = Reservation(tenant, charges, now + LIFE, amounts.requests)
            self._running[tenant] = self._running.get(tenant, 0) + amounts.requests
        counts = [self.used.get(charge.key, 0) for charge in charges]
        return QuotaDecision(now=now, left=left_of(charges, counts, now))

    def settle(self, name: str, used: Amounts) -> None:
        """Replace the tokens and money that were reserved by what was used. Does nothing for a request that is settled
        already."""
        held = self._open.pop(name, None)
        if held is None:
            return
        self._running[held.tenant] = self._running.get(held.tenant, 0) - held.requests
        for charge in held.charges:
            if charge.unit != "requests" and charge.key in self.used:
                self.used[charge.key] += int(getattr(used, charge.unit)) - charge.amount

    def release(self, prefix: str) -> None:
        """Give back what requests have reserved whose ids begin with `prefix`: their process has ended."""
        for name in [name for name in self._open if name.startswith(prefix)]:
            self.settle(name, Amounts())

    def load(self, used: Mapping[str, int], now: float) -> None:
        """Set counters of windows that have not ended, by key: a ledger has them."""
        ends = {period: window(period, now)[1] for period in ("day", "month")}
        for key, count in used.items():
            self.used[key] = self.used.get(key, 0) + count
            self._ends[key] = ends["day"] if ":day:" in key else ends["month"]

    def _sweep(self, now: float) -> None:
        """Forget counters of windows that have ended, and give back reservations that were never settled."""
        self._swept = now
        for name in [name for name, held in self._open.items() if held.expires <= now]:
            self.settle(name, Amounts())
        for key in [key for key, ends in self._ends.items() if ends + 120 <= now]:
            del self._ends[key], self.used[key]
        self._running = {tenant: count for tenant, count in self._running.items() if count}


def charges_of(tenant: str, limits: QuotaLimits, amounts: Amounts, now: float) -> tuple[Charge, ...]:
    """Return the counters that a request adds to, for those limits that the tenant has."""
    found = []
    for limit, unit, period in RATES:
        if (most := getattr(limits, limit)) is None:
            continue
        name, ends = window(period, now)
        whole = int(most * NANO) if unit == "money" else most
        found.append(Charge(limit, counter_key(tenant, unit, period, name), unit, whole, getattr(amounts, unit), ends))
    return tuple(found)


def counter_key(tenant: str, unit: Unit, period: Period, name: str) -> str:
    return f"{tenant}:{unit}:{period}:{name}"


def window(period: Period, now: float) -> tuple[str, float]:
    """Return the name and the end of the window at a time, in seconds since the epoch. Days and months are UTC's."""
    if period == "month":
        day = datetime.datetime.fromtimestamp(now, datetime.UTC)
        after = datetime.datetime(day.year + day.month // 12, day.month % 12 + 1, 1, tzinfo=datetime.UTC)
        return f"{day:%Y-%m}", after.timestamp()
    seconds = 60 if period == "minute" else 86_400
    number = math.floor(now / seconds)
    return str(number), float((number + 1) * seconds)


def refusal(charge: Charge, used: int, now: float) -> QuotaDecision:
    """Return the decision for a request that would exceed a limit."""
    wait = -1.0 if charge.amount > charge.most else charge.ends - now
    return QuotaDecision(now=now, refused=charge.limit, retry_after=wait, left=left_of((charge,), [used], now))


def left_of(charges: Iterable[Charge], used: Iterable[int], now: float) -> dict[str, tuple[int, int, float]]:
    """Return (most, left, seconds to the window's end) of each limit."""
    return {
        charge.limit: (charge.most, max(charge.most - count, 0), max(charge.ends - now, 0.0))
        for charge, count in zip(charges, used, strict=True)
    }
