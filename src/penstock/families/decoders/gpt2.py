"""GPT-2: learned positions, LayerNorm, and matrices that are stored transposed."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import TensorNames, decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import NO_ROPE
from penstock.families.spec import ModelSpec

_NAMES = TensorNames(
    embedding="transformer.wte",
    positions="transformer.wpe",
    layers="transformer.h.",
    norm="transformer.ln_f",
    norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    attention="attn.",
    heads=("c_attn",),
    output="c_proj",
    up=("c_fc",),
    down="c_proj",
    transposed=True,
)


def gpt2(config: HFConfig) -> ModelSpec:
    config = config.without("num_key_value_heads", "head_dim").renamed(
        hidden_size="n_embd",
        num_hidden_layers="n_layer",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    config.refuse("add_cross_attention", "there is no encoder")
    attention_scale = None if config.flag("scale_attn_weights", True) else 1.0
    layer = layer_spec(
        config,
        act=("activation_function", "gelu_new"),
        rope_spec=NO_ROPE,
        attention_scale=attention_scale,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        intermediate_size=config.integer("n_inner", 4 * config.integer("hidden_size")),
        gated=False,
    )
    layers = [layer] * num_layers(config)
    if config.flag("scale_attn_by_inverse_layer_idx"):
        scale = attention_scale or (config.integer("hidden_size") / config.integer("num_attention_heads")) ** -0.5
        layers = [with_attention(each, scale=scale / (i + 1)) for i, each in enumerate(layers)]
    spec = decoder_spec(
        config,
        "gpt2",
        layers,
        max_position=1024,
        tied=True,
        layer_norm=True,
        norm_bias=True,
        eps=("layer_norm_epsilon", 1e-5),
        names=_NAMES,
    )
    masks = ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias")
    return replace(spec, ignored_tensors=(*spec.ignored_tensors, *masks))
