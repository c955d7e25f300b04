"""Opens, admits and settles the accounts of requests, in one API process."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from penstock.config import ServerConfig
from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.errors import APIError
from penstock.frontend.http.asgi import Headers, RequestInfo
from penstock.frontend.siblings import Siblings
from penstock.frontend.storage.database import storage_folder
from penstock.frontend.tenants.account import EngineUse, RequestAccount
from penstock.frontend.tenants.books import Books, LocalBooks, RemoteBooks
from penstock.frontend.tenants.grant import Grant
from penstock.frontend.tenants.ledger import FILE, LedgerRow, rows_since, usage_by_hour
from penstock.frontend.tenants.limits import quota_error, rate_headers
from penstock.frontend.tenants.quotas import LIFE, Amounts, Settlement
from penstock.frontend.tenants.tenant_keys import TenantKeys
from penstock.messages import EngineClient, TokenDelta

LAST_SECONDS = 2.0  # for the engine to say what an aborted request has used
_UNLIMITED = QuotaLimits()


def open_office(server: ServerConfig, siblings: Siblings | None) -> "TenantOffice | None":
    """Returns the office of an API process; None if the server has no tenants. Raises ValueError and OSError."""
    if not server.tenants:
        return None
    keys, folder = TenantKeys(server.tenants), storage_folder(server)
    ledger = None if folder is None else folder / FILE
    # Before a writer opens it. What a server that was killed has not settled in Redis is settled now.
    unsettled = rows_since(ledger, time.time() - LIFE) if server.quota_redis and ledger is not None else []
    books: Books = LocalBooks(server) if siblings is None else RemoteBooks(siblings, audits=server.audit != "none")
    if server.quota_redis:
        from penstock.frontend.tenants.redis_quotas import RedisBooks

        process = 0 if siblings is None else siblings.number
        books = cast(Books, RedisBooks(server.quota_redis, books, unsettled, process))
    return TenantOffice(keys, books, ledger, server.region)


class TenantOffice:
    """The keys and the books of a server with tenants."""

    def __init__(self, keys: TenantKeys, books: Books, ledger: Path | None, region: str) -> None:
        """`ledger` is its file; None: the server has none. `region` is the server's."""
        self.keys, self.books, self._region = keys, books, region
        self._ledger, self._refused = ledger, False
        self._reading = asyncio.Lock()
        self._watched: dict[str, tuple[EngineUse, RequestAccount, asyncio.TimerHandle]] = {}

    def open(self, grant: Grant, wire: str, answer_id: str, headers: Headers) -> RequestAccount:
        """Returns the account of a request, which adds to the `headers` of its answer. Raises APIError 403 if its key
        is not for this API, or its tenant not for this region, and 503 if the audit log must and cannot be written."""
        grant.check_wire(wire)
        grant.check_region("this server", self._region)
        if self._refused or self.books.refuses:
            message = "the server cannot write its audit log, and refuses requests until it can; try again later"
            raise APIError(503, message, code="audit_unavailable", retry_after=5)
        return RequestAccount(self, grant, wire, answer_id, headers)

    def refuse(self, refuses: bool) -> None:
        """Notes whether the supervisor says that requests are to be refused, for the same reason."""
        self._refused = refuses

    def open_batch(self, tenant: str, answer_id: str) -> RequestAccount | None:
        """Returns the account of a line of a batch of the tenant with this id. None if there is no such tenant."""
        grant = self.keys.named(tenant)
        return None if grant is None else RequestAccount(self, grant, "batch", answer_id, [], batch=True)

    async def reserve(self, name: str, grant: Grant, amounts: Amounts) -> Headers:
        """Reserves what a request may use, and returns the headers about its limits. Raises APIError 429."""
        limits = grant.entry.limits
        if limits == _UNLIMITED:
            return []
        decision = await self.books.reserve(name, grant.tenant, limits, amounts)
        headers = rate_headers(decision)
        if decision.refused:
            raise quota_error(decision, amounts, headers)
        return headers

    def finish(self, grant: Grant, row: LedgerRow | None, used: Mapping[str, Amounts]) -> None:
        """Writes the row of a request that has ended, and settles what was `used` by the names of its reservations."""
        settled = [Settlement(name, grant.tenant, amounts) for name, amounts in used.items()]
        self.books.finish(row, settled if grant.entry.limits != _UNLIMITED else [])

    async def usage(self, tenant: str, since: float) -> list[dict[str, Any]]:
        """Returns what a tenant ("": each) has used since a time, by hours."""
        if self._ledger is None:
            return []
        async with self._reading:
            return await asyncio.to_thread(usage_by_hour, self._ledger, since, tenant)

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
        if self.books.audits:
            fields = {"request_id": info.request_id, "method": method, "route": route, "status": status}
            fields |= {"client": client, "tenant": info.grant.tenant if info.grant else ""}
            fields |= {"key": info.grant.key_name if info.grant else "", "why": info.error}
            fields |= {"answer_id": info.answer_id, "ledger": account is not None and account.asked, **info.texts}
            self.books.audit("admin" if info.admin else "request", fields)

    async def close(self) -> None:
        """Settles what is left."""
        for name in list(self._watched):
            self._settle_watched(name)
        await self.books.close()

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
