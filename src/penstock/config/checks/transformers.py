"""Refuses settings that models executed by transformers' code do not support."""

from collections.abc import Mapping
from typing import Any

from penstock.config.sources import ConfigError
from penstock.config.wrong_setting import flag


def check_transformers(values: Mapping[str, Any], sources: Mapping[str, str], architecture: str, device: str) -> None:
    """Raise ConfigError for settings with which transformers' code cannot execute a model."""
    only = {"device": "cpu", "quantization": "none", "kv_cache_dtype": "auto", "distributed_executor": "auto"}
    for name, value in only.items():
        given = device if name == "device" else values[name]
        if given != value:
            raise ConfigError(
                f"{flag(name)} ({sources[name]}) is {given}, but transformers' code executes {architecture}: set "
                f"{flag(name)} {value}"
            )
