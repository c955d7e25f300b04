"""Reads the value of --kv-disk, and checks what it needs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.config.facts import ModelFacts
from penstock.config.sizes import parse_bytes
from penstock.config.sources import ConfigError

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


def check_kv_disk(values: Mapping[str, Any], sources: Mapping[str, str], facts: ModelFacts, device: str) -> None:
    """Raise ConfigError if the disk tier does not go with this model or these settings."""
    if not values["kv_disk"]:
        return
    ranks = values["tensor_parallel_size"] * values["pipeline_parallel_size"]
    if facts.state_elements or len(facts.groups) != 1:
        why = "this model keeps states, or its layers see windows of different sizes: leave it out"
    elif facts.pooling is not None:
        why = "this model gives vectors, and nothing is kept of its texts: leave it out"
    elif device != "cpu":
        why = "the KV cache must be in the host's memory: set --device cpu, or leave it out"
    elif ranks > 1 or values["distributed_executor"] != "auto":
        why = "the KV cache must be in one process: leave it out, or the settings that divide the model among ranks"
    elif not values["enable_prefix_caching"]:
        why = f"--enable-prefix-caching ({sources['enable_prefix_caching']}) is off: leave one of the two out"
    else:
        return
    raise ConfigError(f"--kv-disk ({sources['kv_disk']}) is {values['kv_disk']}, but {why}")
