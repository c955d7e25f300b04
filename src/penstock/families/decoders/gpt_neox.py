"""GPT-NeoX and Pythia: LayerNorm, attention and MLP in parallel, a quarter of each head rotated, and q, k and v of each
head together."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import TensorNames, decoder_spec, layer_spec
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec

_NAMES = TensorNames(
    embedding="gpt_neox.embed_in",
    layers="gpt_neox.layers.",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    attention="attention.",
    heads=("query_key_value",),
    by_group=True,
    output="dense",
    up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)


def gpt_neox(config: HFConfig) -> ModelSpec:
    config = config.without("num_key_value_heads", "head_dim")
    config = config.renamed(rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")
    bias = config.flag("attention_bias", True)
    layer = layer_spec(
        config,
        act=("hidden_act", "gelu"),
        rope_spec=rope(config, partial=0.25),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
        gated=False,
        parallel=config.flag("use_parallel_residual", True),
    )
    spec = decoder_spec(
        config,
        "gpt_neox",
        layer,
        max_position=2048,
        layer_norm=True,
        norm_bias=True,
        eps=("layer_norm_eps", 1e-5),
        names=_NAMES,
    )
    masks = ("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias")
    return replace(spec, ignored_tensors=(*spec.ignored_tensors, *masks))
