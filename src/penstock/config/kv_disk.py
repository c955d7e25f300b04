"""Reads the value of --kv-disk."""

from typing import NamedTuple

from penstock.config.sizes import parse_bytes

DAYS = 30  # that an unused block is kept
MOST_DAYS = 3650


class KVDisk(NamedTuple):
    """A folder for the blocks of the prefix cache."""

    folder: str
    bytes: int  # of all files
    days: float  # until a block that is not used is deleted


def read_kv_disk(text: str) -> KVDisk:
    """Read DIR,SIZE or DIR,SIZE,DAYS. Raises ValueError for any other text."""
    folder, *rest = text.split(",")
    try:
        size = parse_bytes(rest[0])
        days = float(rest[1]) if len(rest) > 1 else DAYS
        good = bool(folder) and len(rest) <= 2 and size > 0 and 0 < days <= MOST_DAYS
    except (ValueError, IndexError):
        good = False
    if not good:
        raise ValueError(
            f"give a folder without a comma, a size and, if unused blocks are not to stay {DAYS} days, up to "
            f"{MOST_DAYS} days: /var/cache/penstock,100GiB or /var/cache/penstock,100GiB,7"
        )
    return KVDisk(folder, size, days)
