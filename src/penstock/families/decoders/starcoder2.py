"""StarCoder 2: LayerNorm, biases, an MLP without a gate, and in some a sliding window."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec, num_layers
from penstock.families.spec import ModelSpec

_NAMES = replace(NAMES, up=("c_fc",), down="c_proj")


def starcoder2(config: HFConfig) -> ModelSpec:
    bias = config.flag("use_bias", True)
    layer = layer_spec(
        config,
        num_kv_heads=2,
        act=("hidden_act", "gelu_pytorch_tanh"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        gated=False,
    )
    return decoder_spec(
        config,
        "starcoder2",
        layer,
        [config.integer("sliding_window", 0, least=0)] * num_layers(config),
        max_position=4096,
        tied=True,
        layer_norm=True,
        norm_bias=True,
        eps=("norm_epsilon", 1e-5),
        names=_NAMES,
    )
