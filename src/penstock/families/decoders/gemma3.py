"""Gemma 3, the text model: window and full layers mixed, each with a rope of its own, and norms on both sides."""

from functools import partial

from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers
from penstock.families.rope_config import rope_of_layers
from penstock.families.spec import ModelSpec


def gemma3(config: HFConfig, prefix: str = "") -> ModelSpec:
    """The spec from a text configuration. Hub files leave out values that equal transformers' defaults: these
    defaults."""
    config.refuse("attn_logit_softcapping", "it belongs to Gemma 2")
    config.refuse("final_logit_softcapping", "it belongs to Gemma 2")
    config.refuse("use_bidirectional_attention", "a decoder's attention is causal")
    bias = config.flag("attention_bias")
    layer = partial(
        layer_spec,
        config,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        act=("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        post_norms=True,
    )
    far = rope_of_layers(config, "full_attention", config.section("rope_scaling"), config.number("rope_theta", 1e6))
    near = rope_of_layers(config, "sliding_attention", None, config.number("rope_local_base_freq", 1e4))
    full, sliding = layer(rope_spec=far), layer(rope_spec=near)
    count = num_layers(config)
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    by_default = [(i + 1) % pattern != 0 for i in range(count)]
    windows = layer_windows(config, count, config.integer("sliding_window", 4096), by_default)
    return decoder_spec(
        config,
        "gemma3",
        [sliding if window else full for window in windows],
        windows,
        prefix=prefix,
        vocab_size=262_208,
        max_position=131_072,
        tied=True,
        norm_offset=1.0,
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )
