"""Refuses KV blocks on a disk, in the host's memory and from other engines where they do not go with the settings."""

from collections.abc import Mapping
from typing import Any

from penstock.config.facts import ModelFacts
from penstock.config.sources import ConfigError


def check_kv_disk(values: Mapping[str, Any], sources: Mapping[str, str], facts: ModelFacts, device: str) -> None:
    """Raise ConfigError if --kv-disk, --kv-host or --prefill-replicas does not go with this model or these settings."""
    name = next((name for name in ("kv_disk", "kv_host", "prefill_replicas") if values[name]), None)
    if name is None:
        return
    ranks = values["tensor_parallel_size"] * values["pipeline_parallel_size"]
    if facts.state_elements or len(facts.groups) != 1:
        why = "this model keeps states, or its layers see windows of different sizes: leave it out"
    elif facts.pooling is not None:
        why = "this model gives vectors, and nothing is kept of its texts: leave it out"
    elif values["prefill_replicas"] and device != "cpu":
        why = "the KV cache must be in the host's memory: set --device cpu, or leave it out"
    elif values["kv_host"] and device == "cpu":
        why = "the KV cache is in the host's memory already: raise --kv-cache-memory instead"
    elif values["kv_host"] and values["kv_disk"]:
        why = (
            "--kv-host is set, too, and what is read from disk is in the host's memory anyway: leave one of the two out"
        )
    elif ranks > 1 or values["distributed_executor"] != "auto":
        why = "the KV cache must be in one process: leave it out, or the settings that divide the model among ranks"
    elif not values["enable_prefix_caching"]:
        why = f"--enable-prefix-caching ({sources['enable_prefix_caching']}) is off: leave one of the two out"
    else:
        return
    raise ConfigError(f"--{name.replace('_', '-')} ({sources[name]}) is {values[name]}, but {why}")
