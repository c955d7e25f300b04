"""Nemotron-H and Nemotron 3: layers of Mamba 2, a few of attention without rope, and MLPs or mixtures of experts, all
without a gate."""

from dataclasses import replace

from penstock.families.decoders.hybrids.mlp_layers import parts_of, renumbered
from penstock.families.decoders.hybrids.shared import (
    BACKBONE,
    MAMBA_FIELDS,
    after_last,
    layers_of_kinds,
    mamba_spec,
    parameters_of_kinds,
)
from penstock.families.experts import ExpertNames, grouped_routing, moe_spec
from penstock.families.hf_config import HFConfig
from penstock.families.kinds.states import mamba_parameters
from penstock.families.llama_like import decoder_spec, layer_spec
from penstock.families.rope_config import NO_ROPE
from penstock.families.spec import ModelSpec, MoESpec

_FIELDS = {**MAMBA_FIELDS, "mamba_n_heads": "mamba_num_heads", "mamba_d_state": "ssm_state_size"}
_NORMS = {"attention_norm": "attention.norm", "mlp_norm": "mlp.norm"}
_NAMES = replace(BACKBONE, norms=_NORMS, attention="attention.mixer.", mlp="mlp.mixer.", up=("up_proj",))
_EXPERTS = ExpertNames(
    router="mlp.mixer.gate",
    experts="mlp.mixer.experts.",
    shared="mlp.mixer.shared_experts.",
    choice_bias="mlp.mixer.gate.e_score_correction_bias",
    experts_in="mlp.mixer.fc1_latent_proj",
    experts_out="mlp.mixer.fc2_latent_proj",
)


def nemotron_h(config: HFConfig) -> ModelSpec:
    state = mamba_spec(config.renamed(**_FIELDS), groups=8, state=128, head_dim=config.integer("mamba_head_dim", 64))
    parts, bias = parts_of(config), config.flag("mlp_bias")
    kinds = {each.mlp for each in parts}
    layer = layer_spec(
        config,
        head_dim=128,
        rope_spec=NO_ROPE,
        intermediate_size=config.integer("intermediate_size") if "mlp" in kinds else 0,
        mlp_bias=bias,
        gated=False,
        act=("mlp_hidden_act", "relu2"),
    )
    alone = replace(layer, intermediate_size=0)
    of_kind = {"": alone, "mlp": layer}
    if "moe" in kinds:
        of_kind["moe"] = replace(alone, moe=_mixture(config))
    layers = [of_kind[each.mlp] for each in parts]
    layers = layers_of_kinds(config, layers, [each.attention for each in parts], {"mamba": state, "attention": None})
    spec = decoder_spec(
        config,
        "nemotron_h",
        layers,
        max_position=4096,
        eps=("layer_norm_epsilon", 1e-5),
        names=_NAMES,
        experts=_EXPERTS,
        attention_parameters=parameters_of_kinds("", mamba_parameters),
        unused=("mtp.*", *after_last(config, _NAMES.layers, sum(len(each.numbers) for each in parts))),
    )
    return renumbered(spec, _NAMES.layers, parts)


def _mixture(config: HFConfig) -> MoESpec:
    if config.flag("mlp_bias"):
        raise config.unsupported("mlp_bias", True, "false, with mixtures of experts")
    if (count := config.integer("n_shared_experts", 1, least=0)) != 1:
        raise config.unsupported("n_shared_experts", count, "1")
    config = config.renamed(n_routed_experts="num_local_experts")
    number, size = ("n_routed_experts", 8), ("moe_intermediate_size", 7688)
    routed = moe_spec(config, count=number, per_token=2, size=size, normalize=config.flag("norm_topk_prob", True))
    return replace(
        grouped_routing(config, routed, sigmoid=True),
        shared_intermediate_size=config.integer("moe_shared_expert_intermediate_size", 7688),
        experts_hidden=config.integer("moe_latent_size", 0, least=0),
    )
