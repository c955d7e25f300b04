"""Refuses settings that latent attention does not support."""

from collections.abc import Mapping
from typing import Any

from penstock.config.sources import ConfigError


def check_latents(values: Mapping[str, Any], sources: Mapping[str, str], device: str) -> None:
    """Raise ConfigError for settings with which a model with latent attention cannot be served."""
    if device != "cpu":
        raise ConfigError(
            f"--device ({sources['device']}) is {device}, but this model has latent attention, whose kernels run on "
            "the CPU; set --device cpu"
        )
    if values["kv_cache_dtype"] == "int8":
        raise ConfigError(
            f"--kv-cache-dtype ({sources['kv_cache_dtype']}) is int8, but this model keeps latents, which are small "
            "already and stay as they are; leave it at auto"
        )
