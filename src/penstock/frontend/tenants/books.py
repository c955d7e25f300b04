"""The books of a server's tenants: the counters of their quotas, the ledger and the audit log.

One process has them. With several API processes that is the supervisor, which the others send messages.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.config import ServerConfig
from penstock.config.tenants.entries import QuotaLimits
from penstock.frontend.siblings import Siblings
from penstock.frontend.storage.database import storage_folder
from penstock.frontend.tenants.audit import AuditLog
from penstock.frontend.tenants.energy import open_meter
from penstock.frontend.tenants.ledger import FILE, Ledger, LedgerRow, existing_ledger, quota_counters
from penstock.frontend.tenants.quotas import Amounts, QuotaDecision, Quotas, Settlement
from penstock.frontend.tenants.request_log import RequestLog


class Books(Protocol):
    """Reserves and settles what requests use, and records it."""

    audits: bool  # there is an audit log

    @property
    def refuses(self) -> bool:
        """True while requests are refused, because the audit log is required and cannot be written."""

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        """Reserves what a request may use, see Quotas. Raises APIError 503 if the counters cannot be reached."""

    def finish(self, row: LedgerRow | None, settled: Sequence[Settlement]) -> None:
        """Writes the row of a request that has ended, and settles what was reserved for it. With several API processes
        the supervisor has been sent the row when this returns: it gets it also if this process is killed then."""

    def written(self, row: LedgerRow) -> Awaitable[object]:
        """Writes a row of the ledger in the same way. Returns what waits until it is committed."""

    def audit(self, event: str, fields: dict[str, Any]) -> None: ...

    async def close(self) -> None:
        """Writes what is left."""


class LocalBooks:
    """Books of this process."""

    def __init__(self, server: ServerConfig) -> None:
        """Raises ValueError and OSError for files that cannot be used."""
        folder, self._started = storage_folder(server), time.time() - time.monotonic()
        self._quotas = Quotas()
        self._ledger: Ledger | None = None
        if folder is not None:
            # First it is read: the writer opens it in a thread, and SQLite cannot set WAL beside that.
            if (connection := existing_ledger(folder / FILE)) is not None:
                self._quotas.load(quota_counters(connection, self._now()), self._now())
                connection.close()
            self._ledger = Ledger(folder / FILE, server.ledger_days)
        self._requests: RequestLog | None = None
        if server.request_log:
            self._requests = RequestLog(Path(server.request_log), server.request_log_share)
        self._meter = open_meter()
        self._audit: AuditLog | None = None
        if server.audit != "none":
            path = Path(server.audit_file or (folder or Path()) / "audit.jsonl")
            heads = Path(server.audit_heads) if server.audit_heads else None
            key = Path(server.audit_key_file).read_bytes().strip() if server.audit_key_file else b""
            self._audit = AuditLog(path, heads, key, required=server.audit == "required")
        self.audits = self._audit is not None

    @property
    def refuses(self) -> bool:
        return self._audit is not None and self._audit.refuses

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        return self._quotas.reserve(name, tenant, limits, amounts, self._now())

    def finish(self, row: LedgerRow | None, settled: Sequence[Settlement]) -> None:
        for each in settled:
            self._quotas.settle(each.name, each.used)
        if row is not None:
            self._keep(row)

    def written(self, row: LedgerRow) -> Awaitable[object]:
        loop, committed = asyncio.get_running_loop(), asyncio.Event()
        self._keep(row, lambda: loop.call_soon_threadsafe(committed.set))
        if self._ledger is None:
            committed.set()
        return committed.wait()

    def audit(self, event: str, fields: dict[str, Any]) -> None:
        if self._audit is not None:
            self._audit.add(event, **fields)

    async def close(self) -> None:
        for each in (self._ledger, self._requests, self._audit):
            if each is not None:
                await asyncio.to_thread(each.close)

    async def answer(self, command: str, message: str) -> str:
        """Returns the reply to a message of RemoteBooks."""
        if command == "reserve":
            asked = msgspec.json.decode(message, type=_Reserve)
            decision = await self.reserve(asked.name, asked.tenant, asked.limits, asked.amounts)
            return msgspec.json.encode(decision).decode()
        record = msgspec.json.decode(message, type=_Record)
        if record.event:
            self.audit(record.event, record.fields)
        elif record.row is not None and command == "written":
            await self.written(record.row)
        else:
            self.finish(record.row, record.settled)
        return ""

    def ended(self, process: int) -> None:
        """Gives back what the requests of an API process that has ended had reserved."""
        self._quotas.release(f"{process}/")

    def _keep(self, row: LedgerRow, written: Callable[[], object] | None = None) -> None:
        if self._meter is not None and self._meter.source:
            joules = self._meter.watts(row.began) * row.step_ms / 1e3
            row = msgspec.structs.replace(row, joules=joules, energy=self._meter.source)
        if self._ledger is not None:
            self._ledger.add(row, written)
        if self._requests is not None:
            self._requests.add(row)

    def _now(self) -> float:
        """Seconds since the epoch that neither jump nor go back: the time at the start, and what has passed since."""
        return self._started + time.monotonic()


class _Reserve(msgspec.Struct, frozen=True):
    name: str
    tenant: str
    limits: QuotaLimits
    amounts: Amounts


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    row: LedgerRow | None = None
    settled: Sequence[Settlement] = ()
    event: str = ""  # of the audit log
    fields: dict[str, Any] = {}


class RemoteBooks:
    """Books of the supervisor, for an API process."""

    def __init__(self, siblings: Siblings, *, audits: bool) -> None:
        self.audits, self.refuses = audits, False  # the supervisor orders when requests are refused
        self._siblings, self._prefix = siblings, f"{siblings.number}/"

    async def reserve(self, name: str, tenant: str, limits: QuotaLimits, amounts: Amounts) -> QuotaDecision:
        request = _Reserve(self._prefix + name, tenant, limits, amounts)
        answer = await self._siblings.ask(f"reserve {msgspec.json.encode(request).decode()}")
        return msgspec.json.decode(answer, type=QuotaDecision)

    def finish(self, row: LedgerRow | None, settled: Sequence[Settlement]) -> None:
        """In one message: if this process is killed, there is a row for what is settled, and for nothing else."""
        own = [Settlement(self._prefix + each.name, each.tenant, each.used) for each in settled]
        self._siblings.notify(_message("record", _Record(row, own)))

    def written(self, row: LedgerRow) -> Awaitable[object]:
        return self._siblings.ask(_message("written", _Record(row)))

    def audit(self, event: str, fields: dict[str, Any]) -> None:
        self._siblings.notify(_message("record", _Record(event=event, fields=fields)))

    async def close(self) -> None:
        """The supervisor goes on."""


def _message(command: str, record: _Record) -> str:
    return f"{command} {msgspec.json.encode(record).decode()}"
