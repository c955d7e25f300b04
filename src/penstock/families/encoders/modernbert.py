"""ModernBERT: norms first, rope, gated MLPs, and attention to near tokens in most layers."""

from dataclasses import replace

from penstock.families.encoders.shared import (
    BidirectionalSpec,
    LayerNames,
    activation,
    affine,
    encoder_layer,
    encoder_spec,
    head_dim,
    head_of,
    labels_of,
)
from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import num_layers
from penstock.families.rope_config import rope_of
from penstock.families.spec import EncoderSpec, ModelSpec, stacked

_NAMES = LayerNames(("attn.Wqkv",), "attn.Wo", "attn_norm", "mlp.Wi", "mlp.Wo", "mlp_norm")
_THETAS = {"full_attention": ("global_rope_theta", 160_000.0), "sliding_attention": ("local_rope_theta", 10_000.0)}


def modernbert(config: HFConfig) -> ModelSpec:
    classifies, prefix = head_of(config, "model.")
    hidden, layers, bias = config.integer("hidden_size"), num_layers(config), config.flag("norm_bias")
    parameters = [
        stacked("tokens.weight", (hidden,), (f"{prefix}embeddings.tok_embeddings.weight", config.integer("vocab_size")))
    ]
    parameters += affine("embedding_norm", [f"{prefix}embeddings.norm"], hidden, bias=bias)
    for i in range(layers):
        parameters += encoder_layer(
            config,
            i,
            f"{prefix}layers.{i}.",
            _NAMES,
            gated=True,
            attention_bias=config.flag("attention_bias"),
            mlp_bias=config.flag("mlp_bias"),
            norm_bias=bias,
            attention_norm=i > 0,
        )
    parameters += affine("norm", [f"{prefix}final_norm"], hidden, bias=bias)
    if classifies:
        parameters += affine("classifier.dense", ["head.dense"], hidden, hidden, bias=config.flag("classifier_bias"))
        parameters += affine("classifier.norm", ["head.norm"], hidden, bias=bias)
        parameters += affine("classifier.out", ["classifier"], len(labels_of(config)), hidden)
    return encoder_spec(
        config,
        "modernbert",
        EncoderSpec(
            activation(config, "hidden_activation", "gelu"),
            gated=True,
            norm_first=True,
            classifier=activation(config, "classifier_activation", "gelu") if classifies else None,
        ),
        _attention(config, layers),
        parameters,
        max_position=config.integer("max_position_embeddings"),
        norm_eps=config.number("norm_eps", 1e-5),
        ignored=() if classifies else ("head.*", "decoder.*"),
    )


def _attention(config: HFConfig, layers: int) -> list[BidirectionalSpec]:
    """Every third layer sees all tokens; the others see half of `local_attention` on either side."""
    every = config.integer("global_attn_every_n_layers", 3)
    window = config.integer("local_attention", 128, least=2)
    windows = layer_windows(config, layers, window, [bool(i % every) for i in range(layers)])
    parameters = config.section("rope_parameters") or HFConfig({})
    ropes = {}
    for kind, (name, theta) in _THETAS.items():
        ropes[kind] = rope_of(parameters.section(kind) or HFConfig({}), config, config.number(name, theta))
    whole = BidirectionalSpec(config.integer("num_attention_heads"), head_dim(config), ropes["full_attention"])
    near = replace(whole, rope=ropes["sliding_attention"], reach=window // 2)
    return [near if each else whole for each in windows]
