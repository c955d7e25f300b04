"""Falcon: attention and MLP in parallel behind one LayerNorm or two, and q, k and v of each KV head together."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import LLAMA_NORMS, TensorNames, decoder_spec, layer_spec
from penstock.families.spec import ModelSpec

_NAMES = TensorNames(
    embedding="transformer.word_embeddings",
    layers="transformer.h.",
    norm="transformer.ln_f",
    attention="self_attention.",
    heads=("query_key_value",),
    by_group=True,
    output="dense",
    up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)


def falcon(config: HFConfig) -> ModelSpec:
    config.refuse("alibi", "positions are rotated; Falcon 7B, 11B, 40B and 180B are so")
    config = config.without("num_key_value_heads", "head_dim")
    config = config.renamed(hidden_size="n_embed", num_hidden_layers="n_layer", num_attention_heads="n_head")
    heads, hidden, bias = config.integer("num_attention_heads"), config.integer("hidden_size"), config.flag("bias")
    grouped, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn", True)
    if grouped:
        kv_heads = config.integer("num_kv_heads", heads)
    else:
        kv_heads = 1 if config.flag("multi_query", True) else heads
    two_norms = not parallel or (grouped and config.integer("num_ln_in_parallel_attn", 2) == 2)
    layer = layer_spec(
        config,
        num_kv_heads=kv_heads,
        act=("activation", "gelu"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        intermediate_size=config.integer("ffn_hidden_size", 4 * hidden),
        gated=False,
        parallel=parallel,
        shared_norm=not two_norms,
    )
    norms = {"attention_norm": "input_layernorm"}
    if two_norms:
        before_mlp = "input_layernorm" if config.flag("gguf") else "ln_mlp"
        norms = {"attention_norm": "ln_attn", "mlp_norm": before_mlp} if parallel else LLAMA_NORMS
    return decoder_spec(
        config,
        "falcon",
        layer,
        max_position=2048,
        tied=True,
        layer_norm=True,
        norm_bias=True,
        eps=("layer_norm_epsilon", 1e-5),
        names=replace(_NAMES, norms=norms),
    )
