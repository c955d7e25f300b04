"""Where records of requests go: to the ledger and the audit log. One process of a server writes both."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.config import ServerConfig
from penstock.frontend.storage.database import storage_folder
from penstock.frontend.tenants.audit import AuditLog
from penstock.frontend.tenants.ledger import FILE, Ledger, LedgerRow


class Records(Protocol):
    """Takes records. No method blocks."""

    @property
    def refuses(self) -> bool:
        """True while requests are refused, because the audit log is required and cannot be written."""
        ...

    @property
    def audits(self) -> bool:
        """True if there is an audit log."""
        ...

    def request(self, row: LedgerRow) -> None: ...

    def audit(self, event: str, **fields: Any) -> None: ...

    def refuse(self, refuses: bool) -> None:
        """Notes whether requests are refused, as the process that writes says."""
        ...

    def close(self) -> None:
        """Writes what is left. Blocks until then."""
        ...


class LocalRecords:
    """Records that this process writes."""

    def __init__(self, server: ServerConfig) -> None:
        """Raises ValueError and OSError for files that cannot be used."""
        folder = storage_folder(server)
        self._ledger = None if folder is None else Ledger(folder / FILE, server.ledger_days)
        self._audit: AuditLog | None = None
        if server.audit != "none":
            path = Path(server.audit_file or (folder or Path()) / "audit.jsonl")
            heads = Path(server.audit_heads) if server.audit_heads else None
            key = Path(server.audit_key_file).read_bytes().strip() if server.audit_key_file else b""
            self._audit = AuditLog(path, heads, key, required=server.audit == "required")

    @property
    def refuses(self) -> bool:
        return self._audit is not None and self._audit.refuses

    @property
    def audits(self) -> bool:
        return self._audit is not None

    def request(self, row: LedgerRow) -> None:
        if self._ledger is not None:
            self._ledger.add(row)

    def audit(self, event: str, **fields: Any) -> None:
        if self._audit is not None:
            self._audit.add(event, **fields)

    def refuse(self, refuses: bool) -> None:
        """This process knows it itself."""

    def take(self, message: str) -> None:
        """Takes a message of a RemoteRecords."""
        record = msgspec.json.decode(message, type=_Record)
        if record.row is not None:
            self.request(record.row)
        if record.event:
            self.audit(record.event, **record.fields)

    def close(self) -> None:
        """Writes what is left. Blocks until then."""
        if self._ledger is not None:
            self._ledger.close()
        if self._audit is not None:
            self._audit.close()


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    row: LedgerRow | None = None
    event: str = ""
    fields: dict[str, Any] = {}


class RemoteRecords:
    """Records that the supervisor writes."""

    def __init__(self, notify: Callable[[str], None], *, audits: bool) -> None:
        """`notify` sends a message to the supervisor, which has no reply."""
        self._notify = notify
        self.audits, self.refuses = audits, False

    def request(self, row: LedgerRow) -> None:
        self._send(_Record(row=row))

    def audit(self, event: str, **fields: Any) -> None:
        self._send(_Record(event=event, fields=fields))

    def refuse(self, refuses: bool) -> None:
        self.refuses = refuses

    def close(self) -> None:
        """The supervisor goes on."""

    def _send(self, record: _Record) -> None:
        self._notify(f"record {msgspec.json.encode(record).decode()}")
