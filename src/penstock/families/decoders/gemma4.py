"""Gemma 4, the text model: window and full layers with heads of their own sizes, values that are normed, keys that are
values in full layers, a scale after each layer; E2B and E4B share keys and values, and have embeddings per layer."""

from dataclasses import replace

from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import NAMES, TensorNames, decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import rope_of_layers
from penstock.families.shared_layers import with_per_layer, with_shared_kv
from penstock.families.spec import LayerSpec, ModelSpec, MoESpec

_EXPERTS = ExpertNames(router="router.proj", stacks=("experts.gate_up_proj", "experts.down_proj"))
_PARTIAL = HFConfig({"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6})


def gemma4(config: HFConfig, names: TensorNames = NAMES) -> ModelSpec:
    if config.get("use_bidirectional_attention") == "all":
        config.refuse("use_bidirectional_attention", "a decoder's attention is causal")
    count = num_layers(config)
    by_default = [(i + 1) % 6 != 0 and i + 1 < count for i in range(count)]
    windows = layer_windows(config, count, config.integer("sliding_window", 512), by_default)
    layers = [_layer(_sizes(config, i, full=not window), full=not window) for i, window in enumerate(windows)]
    layers = with_per_layer(config, layers, names.layers.removesuffix("layers."))
    spec = decoder_spec(
        config,
        "gemma4",
        with_shared_kv(config, layers, windows),
        windows,
        vocab_size=262_144,
        max_position=131_072,
        tied=True,
        names=names,
        experts=_EXPERTS,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        logit_softcap=config.number("final_logit_softcapping", 0.0, or_zero=True),
    )
    unused = [f"{names.layers}{i}.self_attn.[kv]_*" for i in range(count) if spec.kv_layer(i) != i]
    return replace(spec, ignored_tensors=(*spec.ignored_tensors, *unused))


def _layer(config: HFConfig, *, full: bool) -> LayerSpec:
    kind, theta = ("full_attention", 1e6) if full else ("sliding_attention", 1e4)
    default, bias = _PARTIAL if full and not config.get("rope_parameters") else None, config.flag("attention_bias")
    layer = layer_spec(
        config,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        act=("hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=1.0,
        rope_spec=rope_of_layers(config, kind, default, theta),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm="heads",
        post_norms=True,
        output_scale=True,
        moe=_mixture(config) if config.flag("enable_moe_block") else None,
    )
    return with_attention(layer, value_norm=True, keys_are_values=full and config.flag("attention_k_eq_v"))


def _mixture(config: HFConfig) -> MoESpec:
    fields = config.renamed(num_experts_per_tok="top_k_experts")
    size = ("moe_intermediate_size", None)
    moe = moe_spec(fields, count=("num_experts", 128), per_token=8, size=size, normalize=True)
    return replace(moe, beside_mlp=True)


def _sizes(config: HFConfig, index: int, *, full: bool) -> HFConfig:
    """The configuration with the layer's own sizes."""
    if (layers := config.section("per_layer_config")) is not None:
        own = layers.section(str(index)) or HFConfig({})
    elif full:
        heads = config.get("num_global_key_value_heads") if config.flag("attention_k_eq_v") else None
        own = HFConfig({"head_dim": config.get("global_head_dim") or 512, "num_key_value_heads": heads})
    else:
        return config
    return config.inheriting(own, "head_dim", "num_key_value_heads")
