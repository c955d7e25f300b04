"""Layers that share: keys and values of an earlier layer, and tensors with the embeddings of all layers."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.kinds.attention import GroupedQuerySpec
from penstock.families.spec import LayerSpec, Parameter, PerLayerSpec, TensorSource, joined, stacked


def per_layer_parameters(ours: str, theirs: str, spec: PerLayerSpec, hidden: int) -> list[Parameter]:
    """Those of a layer. The table and the projection are this layer's part of tensors for all layers."""
    ours, width, first = f"{ours}per_layer.", spec.width, spec.layer * spec.width
    table = f"{spec.stacked}embed_tokens_per_layer.weight"
    rows = TensorSource(table, 0, spec.rows, first_column=first, columns=width)
    projection = TensorSource(f"{spec.stacked}per_layer_model_projection.weight", 0, width, first)
    return [
        Parameter(f"{ours}table.weight", (spec.rows, width), (rows,), precise=True),
        joined(f"{ours}projection.weight", (hidden,), [projection]),
        stacked(f"{ours}norm.weight", (), (f"{spec.stacked}per_layer_projection_norm.weight", width)),
        stacked(f"{ours}gate.weight", (hidden,), (f"{theirs}per_layer_input_gate.weight", width)),
        stacked(f"{ours}output.weight", (width,), (f"{theirs}per_layer_projection.weight", hidden)),
        stacked(f"{ours}post_norm.weight", (), (f"{theirs}post_per_layer_input_norm.weight", hidden)),
    ]


def with_per_layer(config: HFConfig, layers: Sequence[LayerSpec], stacked: str) -> list[LayerSpec]:
    """The layers, which each have an embedding of their own if hidden_size_per_layer_input is not 0. `stacked` is the
    prefix of the tensors that hold those of all layers."""
    width = config.integer("hidden_size_per_layer_input", 256, least=0)
    if not width:
        return list(layers)
    rows = config.integer("vocab_size_per_layer_input", 262_144)
    return [replace(layer, per_layer=PerLayerSpec(width, rows, i, stacked)) for i, layer in enumerate(layers)]


def with_shared_kv(config: HFConfig, layers: Sequence[LayerSpec], windows: Sequence[int]) -> list[LayerSpec]:
    """The layers, of which the last num_kv_shared_layers read keys and values of the last layer before them with the
    same window; with use_double_wide_mlp their MLPs are twice as wide."""
    shared = config.integer("num_kv_shared_layers", 0, least=0, most=len(layers))
    own = len(layers) - shared
    if {*windows} != {*windows[:own]}:
        raise config.unsupported("num_kv_shared_layers", shared, "a layer of each type before the shared ones")
    wider = 2 if config.flag("use_double_wide_mlp") else 1
    result = list(layers[:own])
    for layer, window in zip(layers[own:], windows[own:], strict=True):
        source = max(i for i in range(own) if windows[i] == window)
        assert isinstance(layer.attention, GroupedQuerySpec)
        attention = replace(layer.attention, kv_layer=source)
        result.append(replace(layer, attention=attention, intermediate_size=wider * layer.intermediate_size))
    return result
