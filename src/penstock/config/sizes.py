"""Converts between byte counts and text such as "4GiB"."""

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)

_REPLICAS = re.compile(r"(?:(\d{1,3}):)?(\d{1,3})")
MOST_REPLICAS = 64

_COUNT = re.compile(r"(\d{1,9})([km])", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Returns the number of bytes that a text such as '4GiB', '500MB', '1.5G' or '1048576' means. KiB, MiB ... are
    powers of 1024; KB, MB ... are powers of 1000. Raises ValueError for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not an amount of memory; write for example 4GiB, 500MB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def replica_limits(text: str) -> tuple[int, int]:
    """Returns the least and the most engines that a text such as '2' or '0:4' means. Raises ValueError for any other
    text."""
    match = _REPLICAS.fullmatch(text.strip())
    least, most = (int(match[1] or match[2]), int(match[2])) if match else (-1, -1)
    if not 0 <= least <= most or not 1 <= most <= MOST_REPLICAS:
        raise ValueError(
            f"give a whole number from 1 to {MOST_REPLICAS}, or two such as 1:4, of which the first may be 0"
        )
    return least, most


def without_unit(text: object) -> str:
    """Returns a hint with the whole number that a text such as '32k' means, 1024 times 32; "" for any other value."""
    match = _COUNT.fullmatch(str(text).strip())
    return f"; {text} is {int(match[1]) << {'k': 10, 'm': 20}[match[2].lower()]}" if match else ""


def format_bytes(count: int) -> str:
    """Returns a byte count as text for people, such as '1.50 GiB', '312 MiB' or '17 B'."""
    sign, size = ("-" if count < 0 else ""), float(abs(count))
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{sign}{size:.0f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} GiB"
