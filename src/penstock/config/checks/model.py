"""Refuses settings that a kind of model does not support."""

from collections.abc import Mapping
from typing import Any

from penstock.config.facts import ModelFacts
from penstock.config.sources import ConfigError
from penstock.config.wrong_setting import flag


def check_model(values: Mapping[str, Any], sources: Mapping[str, str], facts: ModelFacts, device: str) -> None:
    """Raise ConfigError for settings with which a model of this kind cannot be served."""
    pooling = facts.pooling
    if pooling is not None and pooling.encoder:
        _check_encoder(values, sources, device)
    if facts.transformers:
        _check_transformers(values, sources, facts.transformers, device)
    if facts.state_elements:
        _check_states(values, sources, device)
    if facts.latents:
        _check_latents(values, sources, device)
    if pooling is not None and pooling.whole_prompts:
        _check_whole_texts(values, sources)


def _check_encoder(values: Mapping[str, Any], sources: Mapping[str, str], device: str) -> None:
    if device != "cpu":
        raise ConfigError(f"--device ({sources['device']}) is {device}, but encoders run on the CPU; set cpu")
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


def _check_whole_texts(values: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """The longest text must fit in a step."""
    length, tokens = values["max_model_len"], values["max_num_batched_tokens"]
    if tokens < length:
        raise ConfigError(
            f"--max-num-batched-tokens ({sources['max_num_batched_tokens']}) is {tokens}, but this model reads "
            f"texts of up to {length} tokens in one step; set --max-num-batched-tokens {length} or more, or a lower "
            "--max-model-len"
        )


def _check_transformers(values: Mapping[str, Any], sources: Mapping[str, str], architecture: str, device: str) -> None:
    only = {"device": "cpu", "quantization": "none", "kv_cache_dtype": "auto", "distributed_executor": "auto"}
    for name, value in only.items():
        given = device if name == "device" else values[name]
        if given != value:
            raise ConfigError(
                f"{flag(name)} ({sources[name]}) is {given}, but transformers' code executes {architecture}: set "
                f"{flag(name)} {value}"
            )


def _check_states(values: Mapping[str, Any], sources: Mapping[str, str], device: str) -> None:
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


def _check_latents(values: Mapping[str, Any], sources: Mapping[str, str], device: str) -> None:
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
