"""Mistral, dense: Llama with, in some versions, a sliding window in every layer."""

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers
from penstock.families.spec import ModelSpec


def mistral(config: HFConfig) -> ModelSpec:
    if len(set(config.texts("layer_types") or ())) > 1:
        raise config.unsupported("layer_types", "mixed", "one type in all layers (sliding_window, or null for none)")
    window = config.integer("sliding_window", 0, least=0)
    return decoder_spec(config, "mistral", layer_spec(config), [window] * num_layers(config))
