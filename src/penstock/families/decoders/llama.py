"""Llama 2 and 3.x, and decoders that differ from it in one part: Arcee's MLP has no gate, ERNIE 4.5 rotates pairs that
lie side by side."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec

_EPS = ("rms_norm_eps", 1e-5)


def llama(config: HFConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    layer = layer_spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.flag("mlp_bias"))
    return decoder_spec(config, "llama", layer)


def arcee(config: HFConfig) -> ModelSpec:
    bias = config.flag("attention_bias")
    layer = layer_spec(
        config,
        act=("hidden_act", "relu2"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
        gated=False,
    )
    return decoder_spec(config, "arcee", layer, max_position=4096, eps=_EPS, names=replace(NAMES, up=("up_proj",)))


def ernie4_5(config: HFConfig) -> ModelSpec:
    bias = config.flag("use_bias")
    layer = layer_spec(
        config,
        num_kv_heads=2,
        head_dim=128,
        rope_spec=rope(config, 5e5, interleaved=True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )
    return decoder_spec(config, "ernie4_5", layer, max_position=131_072, tied=True, eps=_EPS)
