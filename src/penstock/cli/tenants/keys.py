"""Implements `penstock tenants add | rotate | list | check`."""

import datetime
from pathlib import Path

from msgspec.structs import replace

from penstock.cli.models.table import print_table
from penstock.config.tenants.entries import KeyEntry, QuotaLimits, TenantEntry
from penstock.config.tenants.file import NAME, add_key, read_tenants, today
from penstock.config.tenants.keys import new_key
from penstock.declared.settings import WIRE_NAMES
from penstock.prepare.files import check_file

RELOAD = "A running server reads the file again at SIGHUP, or with: penstock reload"


def add(
    file: str,
    tenant: str,
    name: str,
    expires_in: int | None,
    models: tuple[str, ...],
    wires: tuple[str, ...],
    *,
    admin: bool,
) -> None:
    """Writes a new key into the file, and prints it. Raises ValueError."""
    path = _path(file)
    for what, given in (("TENANT", tenant), ("--key", name)):
        if not NAME.fullmatch(given):
            raise ValueError(f"{what} is {given!r}: give up to 64 letters, digits, '.', '_' and '-'")
    if "" in models:
        raise ValueError("--model is '': give the name of a model, or leave it out for all")
    if unknown := set(wires) - set(WIRE_NAMES):
        raise ValueError(f"--wire is {min(unknown)!r}: give one of {', '.join(WIRE_NAMES)}")
    known = read_tenants(path).tenants.get(tenant, TenantEntry()) if path.exists() else TenantEntry()
    if any(key.name == name for key in known.keys):
        raise ValueError(f"tenant {tenant!r} has a key {name!r}: give another --key, or use penstock tenants rotate")
    if not path.exists():
        check_file("FILE", file)
    key, key_id, stored = new_key()
    expires = None if expires_in is None else today() + datetime.timedelta(days=expires_in)
    add_key(
        path,
        tenant,
        KeyEntry(name=name, id=key_id, hash=stored, expires=expires, models=models, wires=wires, admin=admin),
    )
    _show(key)


def rotate(file: str, tenant: str, name: str, keep_days: int) -> None:
    """Writes a new key with the scopes of an old one into the file, and prints it. Raises ValueError."""
    path = _path(file)
    tenants = read_tenants(path).tenants
    if tenant not in tenants:
        raise ValueError(f"{file} has no tenant {tenant!r}: give one of {', '.join(tenants) or 'none'}")
    old = next((key for key in tenants[tenant].keys if key.name == name), None)
    if old is None:
        names = ", ".join(key.name for key in tenants[tenant].keys) or "none"
        raise ValueError(f"--key: tenant {tenant!r} has no key {name!r}: give one of these: {names}")
    key, key_id, stored = new_key()
    last = today() + datetime.timedelta(days=keep_days - 1)
    ends = last if old.expires is None else min(old.expires, last)
    add_key(
        path,
        tenant,
        replace(old, id=key_id, hash=stored, expires=None),
        replaced=replace(old, name=f"{name[:50]}-{old.id}", expires=ends),
    )
    _show(key)


def list_tenants(file: str) -> None:
    """Prints the tenants and their keys."""
    content = read_tenants(_path(file))
    rows = []
    for name, tenant in content.everyone.items():
        shared = {
            "TENANT": name,
            "WEIGHT": f"{tenant.weight:g}",
            "CLASS": tenant.scheduling_class,
            "GROUP": tenant.group,
            "LIMITS": _limits(tenant.limits),
        }
        for key in tenant.keys or (None,):
            own = {"KEY": "" if key is None else key.name, "EXPIRES": _expiry(key), "FOR": _scopes(key)}
            rows.append({**shared, **own})
    print_table(rows)


def check(file: str) -> None:
    """Prints what the file has. Raises ValueError for a mistake."""
    content = read_tenants(_path(file))
    keys = [key for tenant in content.tenants.values() for key in tenant.keys]
    expired = [key.name for key in keys if key.expired(today())]
    print(f"{file} is valid: {len(content.tenants)} tenants with {len(keys)} keys, {len(expired)} of them expired")


def _path(file: str) -> Path:
    if not file:
        raise ValueError("FILE is '': it is empty; name a YAML file")
    return Path(file)


def _show(key: str) -> None:
    print(f"{key}\n\nThis key is shown only now: the file has a hash of it. {RELOAD}")


def _limits(limits: QuotaLimits) -> str:
    given = {name: getattr(limits, name) for name in limits.__struct_fields__}
    return ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)


def _expiry(key: KeyEntry | None) -> str:
    if key is None or key.expires is None:
        return ""
    return f"{key.expires} (expired)" if key.expired(today()) else str(key.expires)


def _scopes(key: KeyEntry | None) -> str:
    if key is None:
        return ""
    return ", ".join([*key.models, *key.wires, *(["admin"] if key.admin else [])])
