"""Refuses KV blocks on a disk, and from other engines, with models and settings that these do not go with."""

from collections.abc import Mapping
from typing import Any

from penstock.config.facts import ModelFacts
from penstock.config.sources import ConfigError


def check_kv_disk(values: Mapping[str, Any], sources: Mapping[str, str], facts: ModelFacts, device: str) -> None:
    """Raise ConfigError if --kv-disk or --prefill-replicas does not go with this model or these settings."""
    name = "kv_disk" if values["kv_disk"] else "prefill_replicas"
    if not values[name]:
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
    raise ConfigError(f"--{name.replace('_', '-')} ({sources[name]}) is {values[name]}, but {why}")
