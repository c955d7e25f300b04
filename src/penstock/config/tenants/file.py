"""Reads a tenants file, and writes keys into it without changing the rest of its text."""

import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.tenants.entries import ANONYMOUS, KeyEntry, TenantEntry, TenantsFile
from penstock.config.tenants.keys import HASH, ID
from penstock.config.yaml_file import convert_yaml, parse_yaml, read_yaml_text
from penstock.declared.settings import WIRE_NAMES

MAX_BYTES = 4 << 20  # of the file
MAX_TENANTS = 10_000
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_tenants(path: Path) -> TenantsFile:
    """Return what a tenants file says. Raises ValueError that names the file, the place in it and what is wrong."""
    return parse_tenants(_text(path), path)


def parse_tenants(text: str, path: Path) -> TenantsFile:
    """Return what the text of a tenants file says; `path` is for errors. Raises ValueError."""
    content = parse_yaml(text, f"--tenants {path}")
    file = convert_yaml(content, TenantsFile, f"--tenants {path}")
    for place, wrong in _mistakes(file):
        raise ValueError(f"--tenants {path}, at {place}: {wrong}")
    return file


def add_key(path: Path, tenant: str, key: KeyEntry, *, replaced: KeyEntry | None = None) -> None:
    """Write a new key of a tenant into the file, which is made if it does not exist. The tenant may be new.

    `replaced` is an entry that takes the place of the one with its id. Comments and the order of the text stay. Raises
    ValueError if the file has a form in which that is not possible.
    """
    text = _text(path) if path.exists() else ""
    before = parse_tenants(text, path)
    entry = before.tenants.get(tenant, TenantEntry())
    keys = tuple(replaced if replaced is not None and each.id == replaced.id else each for each in entry.keys)
    wanted = msgspec.structs.replace(entry, keys=(*keys, key))
    if replaced is not None:
        text = _replace(text, tenant, replaced)
    text = _insert(text, tenant, _flow(key))
    try:
        done = parse_tenants(text, path).tenants == {**before.tenants, tenant: wanted}
    except ValueError:
        done = False
    if not done:
        raise ValueError(
            f"--tenants {path}: the key cannot be written in the form that the file has; add it to the keys of tenant "
            f"{tenant!r} yourself: {_flow(key)}"
        )
    _write(path, text)


def _mistakes(file: TenantsFile) -> Iterator[tuple[str, str]]:
    """Yields what is wrong in a file whose fields have the right types: the place and the error."""
    if len(file.tenants) > MAX_TENANTS:
        yield "tenants", f"there are {len(file.tenants)}, at most {MAX_TENANTS} are possible; remove some"
    classes, ids = file.known_classes, set[str]()
    if file.batch_class not in classes:
        yield "batch_class", f"there is no class {file.batch_class!r}; add it to classes"
    for name, entry in classes.items():
        for field in ("rank", "reserved", "max_wait", "step_tokens"):
            if not 0 <= getattr(entry, field) <= 1_000_000:
                yield f"classes.{name}.{field}", f"it is {getattr(entry, field)}; give a number from 0 to 1000000"
    for field in ("input_price", "output_price", "step_price", "quantum"):
        if not 0 <= getattr(file.fairness, field) <= 1e9:
            yield f"fairness.{field}", f"it is {getattr(file.fairness, field)}; give a number from 0 to 1000000000"
    if not 0 <= file.watts <= 1e6:
        yield "watts", f"it is {file.watts:g}; give a number from 0 to 1000000"
    for number, price in enumerate(file.prices):
        if min(price.input, price.output, price.cached) < 0:
            yield f"prices[{number}]", "a price is below 0; give 0 or more"
    for name, tenant in file.everyone.items():
        where = ANONYMOUS if tenant is file.anonymous else f"tenants.{name}"
        if not NAME.fullmatch(name) or (name == ANONYMOUS and tenant is not file.anonymous):
            yield where, "a name has up to 64 letters, digits, '.', '_' and '-', and is not 'anonymous'; change it"
        yield from ((f"{where}.{place}", wrong) for place, wrong in _tenant_mistakes(tenant, classes))
        if tenant is file.anonymous and tenant.keys:
            yield f"{where}.keys", "requests without a key need none; remove the keys"
        for key in tenant.keys:
            if key.id in ids:
                yield f"{where}.keys", f"the id {key.id} is there twice; make a new key with penstock tenants rotate"
            ids.add(key.id)


def _tenant_mistakes(tenant: TenantEntry, classes: Any) -> Iterator[tuple[str, str]]:
    if not 0 < tenant.weight <= 1e6:
        yield "weight", f"it is {tenant.weight:g}; give a number above 0, up to 1000000"
    if not 0 < tenant.kv_share <= 1:
        yield "kv_share", f"it is {tenant.kv_share:g}; give a number above 0, up to 1"
    if tenant.scheduling_class not in classes:
        known = ", ".join(sorted(classes))
        yield "class", f"there is no class {tenant.scheduling_class!r}; give one of {known}, or add it to classes"
    for name in tenant.regions:
        if not NAME.fullmatch(name):
            yield "regions", f"{name!r} is no name: give up to 64 letters, digits, '.', '_' and '-'"
    for field in tenant.limits.__struct_fields__:
        if (value := getattr(tenant.limits, field)) is not None and not 0 <= value <= 2**53:
            yield f"limits.{field}", f"it is {value}; give 0 or more, or leave it out for no limit"
    names = [key.name for key in tenant.keys]
    for key in tenant.keys:
        if not NAME.fullmatch(key.name) or names.count(key.name) > 1:
            yield "keys", f"the name {key.name!r} is there twice, or has other characters than a tenant's; change it"
        if not ID.fullmatch(key.id) or not HASH.fullmatch(key.hash):
            yield "keys", f"key {key.name!r} has no valid id and hash; make one with penstock tenants add"
        if unknown := set(key.wires) - set(WIRE_NAMES):
            yield "keys", f"key {key.name!r}: there is no wire {min(unknown)!r}; give names of {', '.join(WIRE_NAMES)}"


# -- the text of the file -----------------------------------------------------------------------------------------


def _flow(key: KeyEntry) -> str:
    """The key as a mapping in braces, which is JSON and so YAML."""
    return json.dumps(msgspec.to_builtins(key))


def _insert(text: str, tenant: str, line: str) -> str:
    """Returns the text with one more key of a tenant, and with the parts around it that are not there yet."""
    import yaml

    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    node, missing = root, ["tenants", tenant, "keys"]
    while missing and (child := _child(node, missing[0])) is not None:
        node, missing = child, missing[1:]
    if node is not None and node.flow_style:  # in braces or brackets
        item = line if not missing else f"{missing[-1]}: [{line}]"
        item = f"{missing[0]}: {{{item}}}" if len(missing) > 1 else item
        at = node.end_mark.index - 1
        return f"{text[:at]}{', ' if node.value else ''}{item}{text[at:]}"
    column = 0 if node is None else node.start_mark.column
    lines = [f"{' ' * (column + 2 * depth)}{name}:\n" for depth, name in enumerate(missing)]
    lines.append(f"{' ' * (column + 2 * len(missing))}- {line}\n")
    if root is not None and not text.endswith("\n"):
        text += "\n"
    return _after(text, len(text) if node is root else _end(node), "".join(lines))


def _replace(text: str, tenant: str, key: KeyEntry) -> str:
    """Returns the text with another entry in the place of the tenant's key with the same id."""
    import yaml

    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for node in _child(_child(_child(root, "tenants"), tenant), "keys").value:
        if getattr(_child(node, "id"), "value", None) == key.id:
            return f"{text[: node.start_mark.index]}{_flow(key)}{text[_end(node) :]}"
    return text


def _child(node: Any, name: str) -> Any:
    """The value of a key in a mapping; None if there is none."""
    pairs = node.value if node is not None and node.id == "mapping" else ()
    return next((value for key, value in pairs if key.value == name), None)


def _end(node: Any) -> int:
    """The index behind the last character of a node. The end mark of a block is behind the comments that follow it."""
    while node.id != "scalar" and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if node.id == "mapping" else last
    return int(node.end_mark.index)


def _after(text: str, index: int, lines: str) -> str:
    """Returns the text with more lines after the line of an index."""
    end = text.find("\n", index)
    end = len(text) if end < 0 else end + 1
    return text[:end] + lines + text[end:]


def _text(path: Path) -> str:
    return read_yaml_text(path, MAX_BYTES, f"--tenants {path}")


def _write(path: Path, text: str) -> None:
    """Replaces the file at once, so that a server never reads half of it. Its mode stays."""
    real = path.resolve()
    mode = real.stat().st_mode & 0o777 if real.exists() else 0o600
    temporary = real.with_name(f".{real.name}.new")
    temporary.touch(0o600)
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(mode)
    temporary.replace(real)


def today() -> datetime.date:
    """The day in UTC."""
    return datetime.datetime.now(datetime.UTC).date()
