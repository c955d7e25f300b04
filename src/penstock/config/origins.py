"""The web origins that may use a server from a browser, the names under which it is reached, and
the proxies before it."""

import ipaddress
import re
from typing import Any

MAX_ORIGINS = 64
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,31})://(?P<host>[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(:\d{1,5})?"
)
_HOST = re.compile(r"[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\]")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def read_origins(value: Any) -> Any:
    """Returns the origins of a setting: a list, or a text with commas. Raises ValueError for one no browser sends."""
    given = _listed(value, "origins", "origins, such as https://app.example.com")
    return tuple(dict.fromkeys(map(_checked, given)))


def read_hosts(value: Any) -> Any:
    """Returns the host names of a setting, without brackets: a list, or a text with commas. Raises ValueError."""
    names = [host.lower() for host in _listed(value, "names", "host names, such as llm.example.com")]
    for name in names:
        if not _HOST.fullmatch(name):
            raise ValueError(
                f"{name[:100]!r} is no host name; give one without scheme and port, such as llm.example.com"
            )
    return tuple(dict.fromkeys(name.strip("[]") for name in names))


def read_networks(value: Any) -> Any:
    """Returns the addresses and networks of a setting: a list, or a text with commas. Raises ValueError."""
    wanted = "addresses or networks, such as 127.0.0.1 or 10.0.0.0/8"
    names = _listed(value, "addresses", wanted, "give fewer, or their network")
    for network in names:
        try:
            ipaddress.ip_network(network)
        except ValueError:
            raise ValueError(
                f"{network[:100]!r} is no address and no network; give one such as 127.0.0.1 or 10.0.0.0/8"
            ) from None
    return tuple(dict.fromkeys(names))


def _listed(value: Any, kind: str, wanted: str, remedy: str = "give fewer") -> list[str]:
    """Returns the texts of a list, or of one text with commas, without blanks around them."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"give {wanted}")
    if len(given) > MAX_ORIGINS:
        raise ValueError(f"{len(given)} {kind} are given; the limit is {MAX_ORIGINS}: {remedy}")
    return [each.strip() for each in given]


def _checked(origin: str) -> str:
    found = _ORIGIN.fullmatch(origin)
    if found is None:
        raise ValueError(
            f"{origin[:100]!r} is no origin; give scheme://host[:port] in small letters, without a path, "
            "such as https://app.example.com; each origin must be named, so * is not one"
        )
    port = _DEFAULT_PORTS.get(found["scheme"])
    if port is not None and found[3] == port:
        raise ValueError(f"{origin!r} has the port that browsers leave out; give {origin.removesuffix(port)}")
    return origin
