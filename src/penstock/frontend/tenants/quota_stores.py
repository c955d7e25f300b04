"""Where the counters of quotas are: in this process, in the supervisor's, or in Redis."""

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.tenants.quotas import Amounts, QuotaDecision, Quotas


class QuotaStore(Protocol):
    """Reserves and settles what requests use. See Quotas."""

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        """Raises APIError 503 if the counters cannot be reached."""
        ...

    async def settle(self, name: str, tenant: str, used: Amounts) -> None: ...

    async def now(self) -> float:
        """Returns the time of the windows, in seconds since the epoch."""
        ...

    async def close(self) -> None: ...


class SteadyClock:
    """Seconds since the epoch that neither jump nor go back: the clock at the start, and what has passed since."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() + self._ahead


class LocalQuotas:
    """The counters of a server with one API process, in its memory."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float]) -> None:
        self.quotas, self._clock = quotas, clock

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        return self.quotas.reserve(name, tenant, limits, amounts, self._clock())

    async def settle(self, name: str, tenant: str, used: Amounts) -> None:
        self.quotas.settle(name, used)

    async def now(self) -> float:
        return self._clock()

    async def close(self) -> None:
        """There is nothing to close."""


class QuotaRequest(msgspec.Struct, frozen=True):
    """What an API process sends to the supervisor. With `limits`, it reserves; without, it settles."""

    name: str
    tenant: str
    amounts: Amounts
    limits: QuotaLimits | None = None


class SupervisorQuotas:
    """The counters of a server with several API processes, which its supervisor has."""

    def __init__(self, ask: Callable[[str], Awaitable[str]], process: int, clock: Callable[[], float]) -> None:
        """`ask` sends a message to the supervisor. `process` is the number of this process."""
        self._ask, self._clock = ask, clock
        self._prefix = process_prefix(process)

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        answer = await self._send(QuotaRequest(self._prefix + name, tenant, amounts, limits))
        return msgspec.json.decode(answer, type=QuotaDecision)

    async def settle(self, name: str, tenant: str, used: Amounts) -> None:
        await self._send(QuotaRequest(self._prefix + name, tenant, used))

    async def now(self) -> float:
        return self._clock()

    async def close(self) -> None:
        """The supervisor goes on."""

    async def _send(self, request: QuotaRequest) -> str:
        return await self._ask(f"quota {msgspec.json.encode(request).decode()}")


class SharedQuotas:
    """The supervisor's side of SupervisorQuotas."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float]) -> None:
        self._quotas, self._clock = quotas, clock

    def answer(self, message: str) -> str:
        """Returns the reply to a QuotaRequest."""
        request = msgspec.json.decode(message, type=QuotaRequest)
        if request.limits is None:
            self._quotas.settle(request.name, request.amounts)
            return ""
        now = self._clock()
        decision = self._quotas.reserve(request.name, request.tenant, request.limits, request.amounts, now)
        return msgspec.json.encode(decision).decode()

    def ended(self, process: int) -> None:
        """Gives back what the requests of a process that has ended had reserved."""
        self._quotas.release(process_prefix(process))


def process_prefix(process: int) -> str:
    return f"{process}/"
