"""What the key of a request allows."""

import hashlib
from typing import NamedTuple

from penstock.config.tenants.entries import KeyEntry, TenantEntry, TenantsFile
from penstock.frontend.errors import APIError
from penstock.messages import other_region


class Grant(NamedTuple):
    """A tenant and one of its keys, as the tenants file was when the request came."""

    file: TenantsFile
    tenant: str  # its name
    entry: TenantEntry
    key: KeyEntry | None  # None: the request has no key

    @property
    def key_name(self) -> str:
        return "" if self.key is None else self.key.name

    @property
    def salt(self) -> str:
        """The begin of the salt for the prefix cache: that of the tenant's group, or its own."""
        return tenant_id(f"group {self.entry.group}") if self.entry.group else tenant_id(self.tenant)

    def check_wire(self, wire: str) -> None:
        """Raises APIError 403 if the key is not for this API."""
        if self.key is not None and self.key.wires and wire not in self.key.wires:
            raise _refused("API", self.key.wires, "wire_not_allowed")

    def check_model(self, names: tuple[str, ...]) -> None:
        """Raises APIError 403 if the key is not for the model with these names."""
        if self.key is not None and self.key.models and not set(names) & set(self.key.models):
            raise _refused("model", self.key.models, "model_not_allowed", "model")

    def check_region(self, what: str, region: str) -> None:
        """Raises APIError 403 if the tenant's requests may not go to `what`, which is in a region."""
        allowed = self.entry.regions
        if allowed and region not in allowed:
            message = f"{other_region(what, region, allowed)}; use a server and models there"
            raise APIError(403, message, code="region_not_allowed")


def _refused(what: str, allowed: tuple[str, ...], code: str, param: str | None = None) -> APIError:
    message = f"this API key is not for this {what}, but for: {', '.join(allowed)}; use another key"
    return APIError(403, message, code=code, param=param)


def tenant_id(name: str) -> str:
    """Returns the id under which the tenant's stored files and its sequences are known. It is that of the holder of the
    same name in a file of API keys. No key begins with a zero byte."""
    return hashlib.sha256(b"\0name " + name.encode()).digest().hex()[:16]
