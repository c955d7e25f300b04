"""Reads the values of settings: a pydantic model with a field for each row of `penstock.declared.settings`."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from penstock.config.kv_disk import read_kv_disk
from penstock.config.origins import read_hosts, read_networks, read_origins
from penstock.config.sizes import parse_bytes, replica_limits
from penstock.config.texts import check_key, check_revision
from penstock.declared.setting import Setting
from penstock.declared.settings import SETTINGS, WIRE_NAMES


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


def _bytes(value: Any) -> Any:
    try:
        return parse_bytes(value) if isinstance(value, str) else _no_bool(value)
    except ValueError:
        raise ValueError("give an amount of memory, such as 4GiB, 500MB or a number of bytes") from None


def _group(value: Any) -> Any:
    if str(value) not in SETTINGS["quantization_group"].kind.choices:
        raise ValueError("give 32, 64 or 128")
    return value


def _wires(value: Any) -> Any:
    names = [name.strip() for name in str(value).split(",")]
    if not set(names) <= {*WIRE_NAMES} or len(names) > len({*names}):
        raise ValueError(f"give different names of {', '.join(WIRE_NAMES)}, with commas between them")
    return ",".join(names)


def _replicas(value: Any) -> Any:
    replica_limits(str(value))
    return str(value).strip()


def _kv_disk(value: Any) -> Any:
    read_kv_disk(str(value))
    return str(value)


def _policy(value: Any) -> Any:
    name = str(value).removeprefix("summarise:")
    if value not in ("error", "drop-oldest") and name in ("", str(value)):
        raise ValueError("give error, drop-oldest or summarise:MODEL with the name of a model")
    return value


def _names(value: Any) -> Any:
    names = [
        part.strip()
        for text in (value if isinstance(value, list | tuple) else [value])
        for part in str(text).split(",")
    ]
    if not all(names):
        raise ValueError("give names, with commas between them")
    return tuple(names)


_KEY = Annotated[str, Field(min_length=1), BeforeValidator(check_key)]


# The types of settings that need a check of their own.
def _resources(value: object) -> object:
    found = _names(value)
    for text in found if isinstance(found, tuple) else ():
        if not re.fullmatch(r"[^:]{1,100}:[1-9][0-9]{0,8}", text):
            raise ValueError(f"give a name and a number from 1, such as memory:4, not {text[:60]!r}")
    return found


_SPECIAL: Mapping[str, Any] = {
    "revision": Annotated[str, Field(min_length=1), BeforeValidator(check_revision)],
    "quantization_group": Annotated[int, BeforeValidator(_group)],
    "api_key": _KEY,
    "admin_key": _KEY,
    "allowed_host": Annotated[tuple[str, ...], BeforeValidator(read_hosts)],
    "trusted_proxy": Annotated[tuple[str, ...], BeforeValidator(read_networks)],
    "cors_origin": Annotated[tuple[str, ...], BeforeValidator(read_origins)],
    "load_model": Annotated[tuple[str, ...], BeforeValidator(_names)],
    "rate_limit_resource": Annotated[tuple[str, ...], BeforeValidator(_resources)],
    "wires": Annotated[str, BeforeValidator(_wires)],
    "replicas": Annotated[str, BeforeValidator(_replicas)],
    "context_policy": Annotated[str, BeforeValidator(_policy)],
    "kv_disk": Annotated[str, BeforeValidator(_kv_disk)],
}


def _type(setting: Setting) -> Any:
    """The type of a setting's values, as pydantic reads and checks it."""
    kind = setting.kind
    if setting.name in _SPECIAL:
        return _SPECIAL[setting.name]
    match kind.name:
        case "whole":
            return Annotated[int, BeforeValidator(_no_bool), Field(ge=kind.least, le=kind.most)]
        case "number":
            return Annotated[float, BeforeValidator(_no_bool), Field(ge=kind.least, gt=kind.above, le=kind.most)]
        case "size":
            return Annotated[int, BeforeValidator(_bytes), Field(ge=kind.least, le=kind.most)]
        case "choice":
            return Literal[kind.choices]
        case "switch":
            return bool
    longest = None if kind.most is None else int(kind.most)
    return Annotated[str, Field(min_length=int(kind.least or 0), max_length=longest)]


class GivenSettings(BaseModel):
    """The values of the settings that were given. None means not given: the value is then that of defaults.py."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    if TYPE_CHECKING:  # those that are read before the others have their defaults
        model: str | None
        revision: str | None
        generation_config: str | None
        device: str | None
        quantization: str | None
        quantization_group: int | None
        kv_cache_dtype: str | None
        max_model_len: int | None
        max_num_batched_tokens: int | None
        host: str | None
        port: int | None
        grpc_port: int | None
        repository: str | None
        repository_cache: int | None
        providers: str | None
        max_loaded: int | None
        watermark: str | None
        watermark_key: str | None
        allow_insecure_bind: bool | None
        replicas: str | None
        engines: str | None
        fleet_key: str | None


_FIELDS: dict[str, Any] = {
    name: (_type(setting) | None, Field(None, description=setting.help)) for name, setting in SETTINGS.items()
}
Settings = create_model("Settings", __base__=GivenSettings, **_FIELDS)
