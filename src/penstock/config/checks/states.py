"""Refuses settings that models with states do not support."""

from collections.abc import Mapping
from typing import Any

from penstock.config.sources import ConfigError


def check_states(values: Mapping[str, Any], sources: Mapping[str, str], device: str) -> None:
    """Raise ConfigError for settings with which a model whose layers keep states cannot be served."""
    if device != "cpu":
        raise ConfigError(
            f"--device ({sources['device']}) is {device}, but this model keeps states, and their kernels run on the "
            "CPU; set --device cpu"
        )
    if values["enable_prefix_caching"]:
        raise ConfigError(
            f"--enable-prefix-caching ({sources['enable_prefix_caching']}) is on, but this model keeps states, which "
            "are not shared between sequences; leave it out"
        )
