"""Checkpoints that count an MLP as a layer of its own, as Nemotron-H's do. Here it belongs to the layer before it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import MAX_LAYERS
from penstock.families.spec import ModelSpec, TensorSource

# An entry of layers_block_type, or a letter of hybrid_override_pattern, to what the layer is.
_KINDS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "E": "moe",
}


class LayerParts(NamedTuple):
    """The parts of a checkpoint that become one layer."""

    attention: str  # "mamba" or "attention"
    mlp: str  # "mlp", "moe" or, without one, ""
    numbers: Mapping[str, int]  # the checkpoint's numbers of the parts "attention" and "mlp"


def parts_of(config: HFConfig) -> list[LayerParts]:
    """The layers of layers_block_type or hybrid_override_pattern. Raises UnsupportedModel for an MLP or a mixture
    behind another one."""
    kinds = config.texts("layers_block_type") or list(config.text("hybrid_override_pattern"))
    if len(kinds) > MAX_LAYERS:
        raise config.unsupported("layers_block_type", f"with {len(kinds)} entries", f"at most {MAX_LAYERS}")
    found: list[LayerParts] = []
    for number, kind in enumerate(_KINDS.get(each, each) for each in kinds):
        if kind in ("mamba", "attention"):
            found.append(LayerParts(kind, "", {"attention": number}))
        elif kind in ("mlp", "moe") and found and not found[-1].mlp:
            found[-1] = found[-1]._replace(mlp=kind, numbers={**found[-1].numbers, "mlp": number})
        else:
            limit = "layers of Mamba 2 or attention, each with at most one mlp or moe behind it"
            raise config.unsupported("layers_block_type", f"{kind} at {number}", limit)
    return found


def renumbered(spec: ModelSpec, layers: str, layer_parts: Sequence[LayerParts]) -> ModelSpec:
    """The spec with the checkpoint's numbers in the names of tensors. These have `layers`, our number of the layer, and
    its part: `backbone.layers.3.mlp.norm`. Parameters of parts that a layer does not have are left out."""
    made = []
    for parameter in spec.parameters:
        sources = [_renumbered(source, layers, layer_parts) for source in parameter.sources]
        if all(sources):
            made.append(replace(parameter, sources=tuple(filter(None, sources))))
    return replace(spec, parameters=tuple(made))


def _renumbered(source: TensorSource, layers: str, layer_parts: Sequence[LayerParts]) -> TensorSource | None:
    if not source.name.startswith(layers):
        return source
    layer, part, name = source.name.removeprefix(layers).split(".", 2)
    number = layer_parts[int(layer)].numbers.get(part)
    return None if number is None else replace(source, name=f"{layers}{number}.{name}")
