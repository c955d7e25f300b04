"""Makes the parts of a server with tenants, for its one API process, for one of several, and for their supervisor."""

import sqlite3
from pathlib import Path

from penstock.config import ServerConfig
from penstock.frontend.siblings import Siblings
from penstock.frontend.storage.database import storage_folder
from penstock.frontend.tenants.ledger import FILE, open_ledger, quota_counters
from penstock.frontend.tenants.office import TenantOffice
from penstock.frontend.tenants.quota_stores import (
    LocalQuotas,
    QuotaStore,
    SharedQuotas,
    SteadyClock,
    SupervisorQuotas,
)
from penstock.frontend.tenants.quotas import Quotas
from penstock.frontend.tenants.records import LocalRecords, Records, RemoteRecords
from penstock.frontend.tenants.tenant_keys import TenantKeys


def open_office(server: ServerConfig, siblings: Siblings | None) -> TenantOffice | None:
    """Returns the office of an API process; None if the server has no tenants. Raises ValueError and OSError."""
    if not server.tenants:
        return None
    clock = SteadyClock()
    quotas: QuotaStore | None = None
    if server.quota_redis:
        from penstock.frontend.tenants.redis_quotas import RedisQuotas

        quotas = RedisQuotas(server.quota_redis)
    records: Records
    if siblings is None:
        # First the counters: the records open the ledger on a thread of theirs, and SQLite cannot set WAL beside that.
        quotas = quotas or LocalQuotas(_quotas_of(server, clock()), clock)
        records = LocalRecords(server)
    else:
        records = RemoteRecords(siblings.notify, audits=server.audit != "none")
        quotas = quotas or SupervisorQuotas(siblings.ask, siblings.number, clock)
    return TenantOffice(TenantKeys(server.tenants), quotas, records)


class SharedOffice:
    """What the supervisor of several API processes has for tenants: their counters and records."""

    def __init__(self, server: ServerConfig) -> None:
        """Raises ValueError and OSError."""
        clock = SteadyClock()
        self.quotas = SharedQuotas(_quotas_of(server, clock()), clock)
        self.records = LocalRecords(server)


def _quotas_of(server: ServerConfig, now: float) -> Quotas:
    """Returns counters that begin with what the ledger has of this day and month."""
    quotas = Quotas()
    folder = storage_folder(server)
    if folder is not None and (path := Path(folder) / FILE).exists():
        try:
            connection = open_ledger(path)
        except sqlite3.Error as error:
            raise ValueError(f"the ledger {path} cannot be read: {error}; move it away to begin a new one") from None
        quotas.load(quota_counters(connection, now), now)
        connection.close()
    return quotas
