"""Makes the table of supported models: the names of each architecture, and what it combines with, which is what the
checks of settings and of splits say of a small model of the family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.checks.model import check_model
from penstock.config.checks.speculation import cannot_speculate
from penstock.config.facts import ModelFacts
from penstock.config.sources import ConfigError
from penstock.config.split import Split
from penstock.families.architectures import ARCHITECTURES, ENCODER_ARCHITECTURES, Architecture
from penstock.families.registry import model_facts, spec_from_config
from penstock.families.shard import CannotSplit, check_split
from penstock.families.spec import ModelSpec

_SAMPLE: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_heads": 8,  # of Mamba 2
    "layers_block_type": ["mamba", "attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 16,
    "attention_chunk_size": 16,
    "new_decoder_architecture": True,
}


_SPLITS = {"tensor": Split(tensor=2), "pipeline": Split(pipeline=2), "expert": Split(tensor=2, expert=True)}
_SETTINGS: Mapping[str, Any] = {
    "device": "cpu",
    "quantization": "none",
    "kv_cache_dtype": "auto",
    "enable_prefix_caching": False,
    "distributed_executor": "auto",
    "max_model_len": 64,
    "max_num_batched_tokens": 64,
}


@dataclass(frozen=True)
class SupportedModel:
    """A row of the table."""

    architecture: str
    models: str
    gives: str
    gguf: tuple[str, ...]  # values of general.architecture
    ranks: tuple[str, ...]  # what can divide it: "tensor", "pipeline", "expert"
    quantization: tuple[str, ...]  # values of --quantization
    quantized_kv: bool  # whether --kv-cache-dtype int8 is possible
    prefix_cache: bool
    speculation: bool
    gpu: bool
    states: bool  # whether layers keep states


def supported_models() -> list[SupportedModel]:
    """All rows, in the order of the table."""
    return [_row(name, each) for name, each in {**ARCHITECTURES, **ENCODER_ARCHITECTURES}.items()]


def _row(architecture: str, known: Architecture) -> SupportedModel:
    spec = _sample(architecture)
    facts, text = model_facts(spec), spec.encoder is None
    return SupportedModel(
        architecture,
        known.models,
        "text" if text else "scores" if architecture.endswith("Classification") else "embeddings",
        known.gguf,
        ranks=tuple(name for name, split in _SPLITS.items() if _divided(spec, split)),
        quantization=tuple(kind for kind in ("int8", "int4") if _accepted(facts, quantization=kind)),
        quantized_kv=any(group.page.width for group in facts.groups) and _accepted(facts, kv_cache_dtype="int8"),
        prefix_cache=text and _accepted(facts, enable_prefix_caching=True),
        speculation=text and cannot_speculate(facts) is None,
        gpu=_accepted(facts, device="cuda"),
        states=bool(spec.state_layers),
    )


def _accepted(facts: ModelFacts, **changes: Any) -> bool:
    """Whether a model is served with these settings."""
    values = {**_SETTINGS, **changes}
    try:
        check_model(values, dict.fromkeys(values, ""), facts, values["device"])
    except ConfigError:
        return False
    return True


def _divided(spec: ModelSpec, split: Split) -> bool:
    try:
        check_split(spec, split)
    except CannotSplit:
        return False
    return True


def _sample(architecture: str) -> ModelSpec:
    """A small spec of the family, with its defaults."""
    return spec_from_config({**_SAMPLE, "text_config": dict(_SAMPLE), "architectures": [architecture]})
