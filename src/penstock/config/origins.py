"""The web origins that may use a server from a browser."""

import re
from typing import Any

MAX_ORIGINS = 64
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]{0,31})://(?P<host>[a-z0-9._-]{1,253}|\[[0-9a-f:.]{2,45}\])(:\d{1,5})?"
)
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def read_origins(value: Any) -> Any:
    """Returns the origins of a setting: a list, or a text with commas. Raises ValueError for one no browser sends."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(origin, str) for origin in given):
        raise ValueError("give origins, such as https://app.example.com")
    if len(given) > MAX_ORIGINS:
        raise ValueError(f"{len(given)} origins are given; the limit is {MAX_ORIGINS}: give fewer")
    return tuple(dict.fromkeys(_checked(origin.strip()) for origin in given))


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
