"""Mamba 2: layers of a state alone, with no MLP."""

from dataclasses import replace

from penstock.families.decoders.hybrids.shared import BACKBONE, MAMBA_FIELDS, mamba_spec, parameters_of_kinds
from penstock.families.hf_config import HFConfig
from penstock.families.kinds.states import mamba_parameters
from penstock.families.llama_like import decoder_spec, num_layers
from penstock.families.spec import LayerSpec, ModelSpec

_NAMES = replace(BACKBONE, norms={"attention_norm": "norm"}, attention="mixer.")
_FIELDS = {**MAMBA_FIELDS, "mamba_n_heads": "num_heads", "mamba_d_state": "state_size", "mamba_expand": "expand"}


def mamba2(config: HFConfig) -> ModelSpec:
    """Sequences may be as long as those of Codestral Mamba, since configurations set no limit."""
    state = mamba_spec(config.renamed(**_FIELDS), groups=8, state=128)
    if (given := config.integer("head_dim", state.value_dim)) != state.value_dim:
        raise config.unsupported("head_dim", given, f"{state.value_dim}: expand * hidden_size / num_heads")
    return decoder_spec(
        config,
        "mamba2",
        [LayerSpec(state, intermediate_size=0, kv_group=0)] * num_layers(config),
        vocab_size=32_768,
        max_position=262_144,
        eps=("layer_norm_epsilon", 1e-5),
        names=_NAMES,
        attention_parameters=parameters_of_kinds("mixer", mamba_parameters),
    )
