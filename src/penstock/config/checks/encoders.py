"""Checks of the settings of models that give vectors."""

from collections.abc import Mapping
from typing import Any

from penstock.config.sources import ConfigError


def check_encoder(values: Mapping[str, Any], sources: Mapping[str, str], device: str) -> None:
    """Raises ConfigError if a setting has a value that encoders do not support."""
    if device != "cpu":
        raise ConfigError(f"--device ({sources['device']}) is {values['device']}, but encoders run on the CPU; set cpu")
    if values["distributed_executor"] != "auto":
        raise ConfigError(
            f"--distributed-executor ({sources['distributed_executor']}) is {values['distributed_executor']}, but an "
            "encoder runs in the engine's process: set auto"
        )
    if values["quantization"] not in ("none", "int8"):
        raise ConfigError(
            f"--quantization ({sources['quantization']}) is {values['quantization']}, but encoders support none and "
            "int8; set --quantization int8"
        )


def check_whole_texts(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Raises ConfigError unless the longest text fits in a step."""
    length, tokens = values["max_model_len"], values["max_num_batched_tokens"]
    if tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens ({sources['max_num_batched_tokens']}) is {tokens}, but this model reads "
            f"texts of up to {length} tokens in one step; set --max-num-batched-tokens {length} or more, or a lower "
            "--max-model-len"
        )
