"""OPT: learned positions, LayerNorm, and an MLP with ReLU."""

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import TensorNames, decoder_spec, layer_spec
from penstock.families.rope_config import NO_ROPE
from penstock.families.spec import ModelSpec

_NAMES = TensorNames(
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    first_position=2,
    layers="model.decoder.layers.",
    norm="model.decoder.final_layer_norm",
    norms={"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
    output="out_proj",
    mlp="",
    up=("fc1",),
    down="fc2",
)


def opt(config: HFConfig) -> ModelSpec:
    config = config.without("num_key_value_heads", "head_dim")
    for name in ("do_layer_norm_before", "layer_norm_elementwise_affine"):
        if not config.flag(name, True):
            raise config.unsupported(name, False, "true, as in all sizes but 350m")
    config.refuse("_remove_final_layer_norm", "there is a norm before the head")
    hidden, bias = config.integer("hidden_size"), config.flag("enable_bias", True)
    if config.integer("word_embed_proj_dim", hidden) != hidden:
        raise config.unsupported("word_embed_proj_dim", config.get("word_embed_proj_dim"), f"hidden_size ({hidden})")
    layer = layer_spec(
        config,
        act=("activation_function", "relu"),
        rope_spec=NO_ROPE,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        intermediate_size=config.integer("ffn_dim"),
        gated=False,
    )
    return decoder_spec(
        config,
        "opt",
        layer,
        max_position=2048,
        tied=True,
        layer_norm=True,
        norm_bias=True,
        eps=("layer_norm_eps", 1e-5),
        names=_NAMES,
    )
