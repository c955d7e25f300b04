"""Shared by families that have layers with a state beside attention."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.families.hf_config import HFConfig
from penstock.families.kinds.attention import GroupedQuerySpec
from penstock.families.kinds.states import RecurrentSpec
from penstock.families.llama_like import NAMES, AttentionParameters, grouped_query_parameters
from penstock.families.spec import LayerSpec, Parameter

# Names of tensors and fields that Mamba 2's checkpoints and Nemotron-H's share.
BACKBONE = replace(NAMES, embedding="backbone.embeddings", layers="backbone.layers.", norm="backbone.norm_f")
MAMBA_FIELDS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_UNBOUNDED = (float("inf"), "Infinity", {"__float__": "Infinity"})  # as JSON has it


def layers_of_kinds(
    config: HFConfig, layers: Sequence[LayerSpec], kinds: Sequence[str], states: Mapping[str, RecurrentSpec | None]
) -> list[LayerSpec]:
    """The layers, each of its kind, an entry of layer_types: with the state of `states` instead of attention, if that
    has one. Raises UnsupportedModel for another number of entries, and for a kind that is not in `states`."""
    if len(kinds) != len(layers):
        limit = f"one for each of {len(layers)} layers"
        raise config.unsupported("layer_types", f"with {len(kinds)} entries", limit)
    made = []
    for layer, kind in zip(layers, kinds, strict=True):
        if kind not in states:
            raise config.unsupported("layer_types", kind, ", ".join(states))
        made.append(replace(layer, attention=states[kind] or layer.attention))
    return made


def after_last(config: HFConfig, layers: str, count: int) -> tuple[str, ...]:
    """The pattern of the tensors of a GGUF file's layer after the last one, which predicts a token further on."""
    return (f"{layers}{count}.*",) if config.flag("gguf") else ()


def parameters_of_kinds(
    name: str, of_state: Callable[[str, str, RecurrentSpec, int], list[Parameter]]
) -> AttentionParameters:
    """Makes the parameters of attention, and by `of_state` those of layers with a state. A checkpoint calls these
    `name`."""

    def parameters(ours: str, theirs: str, spec: Any, hidden: int) -> list[Parameter]:
        if isinstance(spec, GroupedQuerySpec):
            return grouped_query_parameters(ours, theirs, spec, hidden)
        return of_state(ours, theirs.replace("self_attn", name), spec, hidden)

    return parameters


def mamba_spec(config: HFConfig, *, groups: int, state: int, head_dim: int | None = None) -> RecurrentSpec:
    """Mamba 2, by the names of fields that Granite and Bamba have. `groups` and `state` are the family's defaults. The
    heads have together `mamba_expand` times the hidden size, or each `head_dim`.

    Raises UnsupportedModel for sizes that contradict each other, and for limits of the time step."""
    heads, groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", groups)
    width = heads * head_dim if head_dim else config.integer("mamba_expand", 2) * config.integer("hidden_size")
    if width % heads or heads % groups:
        raise config.unsupported("mamba_n_heads", heads, f"a divisor of {width} and a multiple of {groups} groups")
    if (limit := config.get("time_step_limit")) not in (None, *([0.0, most] for most in _UNBOUNDED)):
        raise config.unsupported("time_step_limit", limit, "no limit: 0 to infinity")
    return RecurrentSpec(
        key_heads=groups,
        value_heads=heads,
        key_dim=config.integer("mamba_d_state", state),
        value_dim=width // heads,
        taps=config.integer("mamba_d_conv", 4, least=2),
        norm_groups=groups,
        delta=False,
        conv_bias=config.flag("mamba_conv_bias", True),
        projection_bias=config.flag("mamba_proj_bias"),
    )
