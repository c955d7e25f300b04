"""Refuses settings that a kind of model does not support."""

from collections.abc import Mapping
from typing import Any

from penstock.config.checks.encoders import check_encoder, check_whole_texts
from penstock.config.checks.latents import check_latents
from penstock.config.checks.states import check_states
from penstock.config.checks.transformers import check_transformers
from penstock.config.facts import ModelFacts


def check_model(values: Mapping[str, Any], sources: Mapping[str, str], facts: ModelFacts, device: str) -> None:
    """Raise ConfigError for settings with which a model of this kind cannot be served."""
    pooling = facts.pooling
    if pooling is not None and pooling.encoder:
        check_encoder(values, sources, device)
    if facts.transformers:
        check_transformers(values, sources, facts.transformers, device)
    if facts.state_elements:
        check_states(values, sources, device)
    if facts.latents:
        check_latents(values, sources, device)
    if pooling is not None and pooling.whole_prompts:
        check_whole_texts(values, sources)
