"""Opens, admits and settles the accounts of requests, in one API process."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Headers, RequestInfo
from penstock.frontend.tenants.account import EngineUse, RequestAccount
from penstock.frontend.tenants.grant import Grant
from penstock.frontend.tenants.limits import quota_error, rate_headers
from penstock.frontend.tenants.quota_stores import QuotaStore
from penstock.frontend.tenants.quotas import Amounts
from penstock.frontend.tenants.records import Records
from penstock.frontend.tenants.tenant_keys import TenantKeys
from penstock.messages import EngineClient, TokenDelta

LAST_SECONDS = 2.0  # for the engine to say what an aborted request has used
_UNLIMITED = QuotaLimits()


class TenantOffice:
    """The keys, quotas and records of a server with tenants."""

    def __init__(self, keys: TenantKeys, quotas: QuotaStore, records: Records) -> None:
        self.keys, self.records = keys, records
        self._quotas = quotas
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: dict[str, tuple[EngineUse, RequestAccount, asyncio.TimerHandle]] = {}

    def open(self, grant: Grant, wire: str, answer_id: str, headers: Headers) -> RequestAccount:
        """Returns the account of a request, which adds to the `headers` of its answer. Raises APIError 403 if its key
        is not for this API, and 503 if the audit log must be written and cannot be."""
        grant.check_wire(wire)
        if self.records.refuses:
            message = "the server cannot write its audit log, and refuses requests until it can; try again later"
            raise APIError(503, message, code="audit_unavailable", retry_after=5)
        return RequestAccount(self, grant, wire, answer_id, headers)

    def open_batch(self, tenant: str, answer_id: str) -> RequestAccount | None:
        """Returns the account of a line of a batch of the tenant with this id. None if there is no such tenant."""
        grant = self.keys.named(tenant)
        return None if grant is None else RequestAccount(self, grant, "batch", answer_id, [], batch=True)

    async def reserve(self, name: str, grant: Grant, amounts: Amounts) -> Headers:
        """Reserves what a request may use, and returns the headers about its limits. Raises APIError 429."""
        limits = grant.entry.limits
        if limits == _UNLIMITED:
            return []
        decision = await self._quotas.reserve(name, grant.tenant, limits, amounts)
        headers = rate_headers(decision, await self._quotas.now())
        if decision.refused:
            raise quota_error(decision, amounts, headers)
        return headers

    def settle(self, name: str, grant: Grant, used: Amounts) -> None:
        if grant.entry.limits != _UNLIMITED:
            self._soon(self._quotas.settle(name, grant.tenant, used))

    def watch(self, client: EngineClient, use: EngineUse, account: RequestAccount) -> bool:
        """Settles a use of the engine when the engine has said what it was, or after LAST_SECONDS. Returns False for an
        engine that does not say it."""
        if (watch := getattr(client, "watch_ends", None)) is None:
            return False
        watch(self._take)
        timer = asyncio.get_running_loop().call_later(LAST_SECONDS, self._settle_watched, use.name)
        self._watched[use.name] = (use, account, timer)
        return True

    def watches(self, account: RequestAccount) -> bool:
        """Returns True while a use of the account is not settled."""
        return any(watched is account for _, watched, _ in self._watched.values())

    def record(self, info: RequestInfo, method: str, route: str, status: int, client: str) -> None:
        """Records the end of a request, allowed or refused."""
        account: RequestAccount | None = info.account
        if account is not None:
            account.close(request_id=info.request_id, route=route, status=status, error=info.error)
        if self.records.audits:
            fields = {"request_id": info.request_id, "method": method, "route": route, "status": status}
            fields |= {"client": client, "tenant": info.grant.tenant if info.grant else ""}
            fields |= {"key": info.grant.key_name if info.grant else "", "why": info.error}
            fields |= {"answer_id": info.answer_id, "ledger": account is not None and account.asked, **info.texts}
            self.records.audit("admin" if info.admin else "request", **fields)

    async def close(self) -> None:
        """Settles what is left."""
        for name in list(self._watched):
            self._settle_watched(name)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_SECONDS)
        await self._quotas.close()
        await asyncio.to_thread(self.records.close)

    def _take(self, delta: TokenDelta) -> None:
        """Takes the last delta of a choice whose stream was closed."""
        found = self._watched.get(delta.request_id)
        if found is None:
            return
        found[0].note(delta)
        if not found[0].open:
            self._settle_watched(delta.request_id)

    def _settle_watched(self, name: str) -> None:
        use, account, timer = self._watched.pop(name)
        timer.cancel()
        account.settle(use)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
