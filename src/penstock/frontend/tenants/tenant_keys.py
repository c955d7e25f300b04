"""The keys of a tenants file."""

import logging
from collections.abc import Mapping
from pathlib import Path

from penstock.config.tenants.entries import ANONYMOUS, KeyEntry, TenantEntry, TenantsFile
from penstock.config.tenants.file import read_tenants, today
from penstock.config.tenants.keys import key_id, matches
from penstock.frontend.http.keys import Holder
from penstock.frontend.tenants.grant import Grant, tenant_id

_log = logging.getLogger("penstock.tenants")


class TenantKeys:
    """ApiKeys of a tenants file. `file` is what it said when it was last read."""

    def __init__(self, path: str) -> None:
        """Raises ValueError."""
        self._path = Path(path)
        self._take(read_tenants(self._path))

    @property
    def required(self) -> bool:
        return self.file.anonymous is None

    @property
    def tenants(self) -> list[str]:
        """The ids of all tenants."""
        return sorted(map(tenant_id, self.file.everyone))

    def holder(self, key: bytes) -> Holder | None:
        """Returns the holder of a key, or None if it is not valid. Without a key it is the anonymous tenant, if there
        is one."""
        if not key:
            anonymous = self.file.anonymous
            return None if anonymous is None else self._holder(ANONYMOUS, anonymous, None)
        found = self._by_id.get(key_id(key) or "")
        if found is None:
            return None
        name, tenant, entry = found
        if not matches(key, entry.hash) or entry.expired(today()):
            return None
        return self._holder(name, tenant, entry)

    def named(self, tenant: str) -> Grant | None:
        """Returns what a tenant with this id may do without a key: its batches run on."""
        name = self._names.get(tenant)
        return None if name is None else Grant(self.file, name, self.file.everyone[name], None)

    def reload(self) -> None:
        """Reads the file again. If it cannot be used, a line of the log says why, and all stays as it is."""
        try:
            self._take(read_tenants(self._path))
        except ValueError as error:
            _log.error("the tenants stay as they are: %s", error)
        else:
            _log.info("%d tenants have %d keys", len(self.file.tenants), len(self._by_id))

    def _take(self, file: TenantsFile) -> None:
        by_id: dict[str, tuple[str, TenantEntry, KeyEntry]] = {}
        for name, tenant in file.tenants.items():
            by_id.update({key.id: (name, tenant, key) for key in tenant.keys})
        self.file = file
        self._by_id: Mapping[str, tuple[str, TenantEntry, KeyEntry]] = by_id
        self._names = {tenant_id(name): name for name in file.everyone}

    def _holder(self, name: str, tenant: TenantEntry, key: KeyEntry | None) -> Holder:
        shown = name if key is None else f"{name}/{key.name}"
        return Holder(tenant_id(name), shown, Grant(self.file, name, tenant, key))
