"""Nemotron-H: layers of Mamba 2, a few of attention without rope, and MLPs without a gate. A checkpoint counts an MLP
as a layer of its own; here it belongs to the layer before it."""

from dataclasses import replace
from typing import Any

from penstock.families.decoders.hybrids.shared import mamba_spec, parameters_of_kinds
from penstock.families.hf_config import HFConfig
from penstock.families.kinds.states import mamba_parameters
from penstock.families.llama_like import MAX_LAYERS, NAMES, decoder_spec, layer_spec
from penstock.families.rope_config import NO_ROPE
from penstock.families.spec import ModelSpec, TensorSource

_KINDS = {"M": "mamba", "linear_attention": "mamba", "*": "attention", "full_attention": "attention", "-": "mlp"}
_FIELDS = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
_NAMES = replace(
    NAMES,
    embedding="backbone.embeddings",
    layers="backbone.layers.",
    norm="backbone.norm_f",
    norms={"attention_norm": "attention.norm", "mlp_norm": "mlp.norm"},
    attention="attention.mixer.",
    mlp="mlp.mixer.",
    up=("up_proj",),
)


def nemotron_h(config: HFConfig) -> ModelSpec:
    state = mamba_spec(config.renamed(**_FIELDS), groups=8, state=128, head_dim=config.integer("mamba_head_dim", 64))
    bias, act = config.flag("mlp_bias"), ("mlp_hidden_act", "relu2")
    layer = layer_spec(config, rope_spec=NO_ROPE, head_dim=128, mlp_bias=bias, gated=False, act=act)
    layers, places = [], _places(config)
    for kind, place in places:
        attention = state if kind == "mamba" else layer.attention
        layers.append(replace(layer, attention=attention, intermediate_size=layer.intermediate_size * ("mlp" in place)))
    names: dict[str, Any] = {"names": _NAMES, "attention_parameters": parameters_of_kinds("", mamba_parameters)}
    spec = decoder_spec(config, "nemotron_h", layers, max_position=4096, eps=("layer_norm_epsilon", 1e-5), **names)
    made = []
    for each in spec.parameters:
        sources = [_placed(source, places) for source in each.sources]
        made += [replace(each, sources=tuple(filter(None, sources)))] if all(sources) else []
    return replace(spec, parameters=tuple(made), ignored_tensors=(*spec.ignored_tensors, "mtp.*"))


def _places(config: HFConfig) -> list[tuple[str, dict[str, int]]]:
    """The kind of each layer, and the checkpoint's numbers of its parts. Raises UnsupportedModel for an MLP behind an
    MLP, and for mixtures of experts."""
    kinds = config.texts("layers_block_type") or list(config.text("hybrid_override_pattern"))
    if len(kinds) > MAX_LAYERS:
        raise config.unsupported("layers_block_type", f"with {len(kinds)} entries", f"at most {MAX_LAYERS}")
    places: list[tuple[str, dict[str, int]]] = []
    for number, kind in enumerate(_KINDS.get(each, each) for each in kinds):
        if kind in ("mamba", "attention"):
            places.append((kind, {"attention": number}))
        elif kind == "mlp" and places and "mlp" not in places[-1][1]:
            places[-1][1]["mlp"] = number
        else:
            limit = "layers of Mamba 2 or attention, each with at most one mlp behind it"
            raise config.unsupported("layers_block_type", f"{kind} at {number}", limit)
    return places


def _placed(source: TensorSource, places: list[tuple[str, dict[str, int]]]) -> TensorSource | None:
    """The source with the checkpoint's number of its layer. None for the norm of an MLP that there is not."""
    if not source.name.startswith(_NAMES.layers):
        return source
    layer, part, name = source.name.removeprefix(_NAMES.layers).split(".", 2)
    number = places[int(layer)][1].get(part)
    return None if number is None else replace(source, name=f"{_NAMES.layers}{number}.{name}")
