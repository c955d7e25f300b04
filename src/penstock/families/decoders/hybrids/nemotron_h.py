"""Nemotron-H and Nemotron 3: layers of Mamba 2, a few of attention without rope, and MLPs or mixtures of experts, all
without a gate. A checkpoint counts an MLP as a layer of its own; here it belongs to the layer before it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.families.decoders.hybrids.shared import after_last, mamba_spec, parameters_of_kinds
from penstock.families.experts import ExpertNames, grouped_routing, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.kinds.states import mamba_parameters
from penstock.families.llama_like import MAX_LAYERS, NAMES, decoder_spec, layer_spec
from penstock.families.rope_config import NO_ROPE
from penstock.families.spec import ModelSpec, MoESpec, TensorSource

_KINDS = {
    "M": "mamba",
    "linear_attention": "mamba",
    "*": "attention",
    "full_attention": "attention",
    "-": "mlp",
    "E": "moe",
}
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
_EXPERTS = ExpertNames(
    router="mlp.mixer.gate",
    experts="mlp.mixer.experts.",
    shared="mlp.mixer.shared_experts.",
    choice_bias="mlp.mixer.gate.e_score_correction_bias",
    experts_in="mlp.mixer.fc1_latent_proj",
    experts_out="mlp.mixer.fc2_latent_proj",
)


class _LayerParts(NamedTuple):
    """The checkpoint's parts that become one layer: their kinds ("mlp", "moe" or "" behind attention), and their
    numbers."""

    attention: str
    mlp: str
    numbers: Mapping[str, int]


def nemotron_h(config: HFConfig) -> ModelSpec:
    state = mamba_spec(config.renamed(**_FIELDS), groups=8, state=128, head_dim=config.integer("mamba_head_dim", 64))
    bias, act = config.flag("mlp_bias"), ("mlp_hidden_act", "relu2")
    blocks = _blocks(config)
    dense = 0 if all(block.mlp != "mlp" for block in blocks) else None  # None: as the configuration says
    layer = layer_spec(
        config, rope_spec=NO_ROPE, head_dim=128, intermediate_size=dense, mlp_bias=bias, gated=False, act=act
    )
    sizes = {"mlp": layer.intermediate_size}
    moe = _mixture(config, mlp_bias=bias) if any(block.mlp == "moe" for block in blocks) else None
    layers = [
        replace(
            layer,
            attention=state if block.attention == "mamba" else layer.attention,
            intermediate_size=sizes.get(block.mlp, 0),
            moe=moe if block.mlp == "moe" else None,
        )
        for block in blocks
    ]
    names: dict[str, Any] = {"names": _NAMES, "attention_parameters": parameters_of_kinds("", mamba_parameters)}
    eps = ("layer_norm_epsilon", 1e-5)
    spec = decoder_spec(config, "nemotron_h", layers, max_position=4096, eps=eps, experts=_EXPERTS, **names)
    made = []
    for each in spec.parameters:
        sources = [_placed(source, blocks) for source in each.sources]
        made += [replace(each, sources=tuple(filter(None, sources)))] if all(sources) else []
    unused = (
        *spec.ignored_tensors,
        "mtp.*",
        *after_last(config, _NAMES.layers, sum(len(block.numbers) for block in blocks)),
    )
    return replace(spec, parameters=tuple(made), ignored_tensors=unused)


def _mixture(config: HFConfig, *, mlp_bias: bool) -> MoESpec:
    if mlp_bias:
        raise config.unsupported("mlp_bias", True, "false, with mixtures of experts")
    if (count := config.integer("n_shared_experts", 1, least=0)) != 1:
        raise config.unsupported("n_shared_experts", count, "1")
    routed = moe_spec(
        config,
        count=("num_local_experts" if config.get("num_local_experts") is not None else "n_routed_experts", 8),
        per_token=2,
        size=("moe_intermediate_size", 7688),
        normalize=config.flag("norm_topk_prob", True),
    )
    return replace(
        grouped_routing(config, routed),
        sigmoid=True,
        by_pairs=True,
        choice_bias=True,
        shared_intermediate_size=config.integer("moe_shared_expert_intermediate_size", 7688),
        experts_hidden=config.integer("moe_latent_size", 0, least=0),
    )


def _blocks(config: HFConfig) -> list[_LayerParts]:
    """The layers. Raises UnsupportedModel for an MLP or a mixture behind another one."""
    kinds = config.texts("layers_block_type") or list(config.text("hybrid_override_pattern"))
    if len(kinds) > MAX_LAYERS:
        raise config.unsupported("layers_block_type", f"with {len(kinds)} entries", f"at most {MAX_LAYERS}")
    blocks: list[_LayerParts] = []
    for number, kind in enumerate(_KINDS.get(each, each) for each in kinds):
        if kind in ("mamba", "attention"):
            blocks.append(_LayerParts(kind, "", {"attention": number}))
        elif kind in ("mlp", "moe") and blocks and not blocks[-1].mlp:
            blocks[-1] = blocks[-1]._replace(mlp=kind, numbers={**blocks[-1].numbers, "mlp": number})
        else:
            limit = "layers of Mamba 2 or attention, each with at most one mlp or moe behind it"
            raise config.unsupported("layers_block_type", f"{kind} at {number}", limit)
    return blocks


def _placed(source: TensorSource, blocks: list[_LayerParts]) -> TensorSource | None:
    """The source with the checkpoint's number of its layer. None for the norm of an MLP that there is not."""
    if not source.name.startswith(_NAMES.layers):
        return source
    layer, part, name = source.name.removeprefix(_NAMES.layers).split(".", 2)
    number = blocks[int(layer)].numbers.get(part)
    return None if number is None else replace(source, name=f"{_NAMES.layers}{number}.{name}")
