"""gpt-oss: window and full layers in turn, a sink for each head, and mixtures of experts with biases and a bounded
SwiGLU, whose matrices are MXFP4 or floats."""

from dataclasses import replace

from penstock.families.experts import ExpertNames, moe_spec
from penstock.families.hf_config import HFConfig, layer_windows
from penstock.families.llama_like import decoder_spec, layer_spec, num_layers, with_attention
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec

_NAMES = ExpertNames(
    router="mlp.router", stacks=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), alternating=True
)
_SWIGLU = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of the kernels
_ROPE = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


def gpt_oss(config: HFConfig) -> ModelSpec:
    for name, value in _SWIGLU.items():
        if config.number(name, value) != value:
            raise config.unsupported(name, config.get(name), str(value))
    if config.section("rope_scaling") is None and config.section("rope_parameters") is None:
        config = config.with_section("rope_parameters", **_ROPE)
    bias, count = config.flag("attention_bias", True), num_layers(config)
    dense = layer_spec(
        config,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope_spec=rope(config, 150_000.0),
        qkv_bias=bias,
        output_bias=bias,
        intermediate_size=0,
    )
    routed = moe_spec(
        config, count=("num_local_experts", 128), per_token=4, size=("intermediate_size", 2880), normalize=True
    )
    layer = replace(dense, activation="swiglu_oai", moe=replace(routed, biases=True))
    windows = layer_windows(config, count, config.integer("sliding_window", 128), [i % 2 == 0 for i in range(count)])
    quantized = config.section("quantization_config") is not None
    return decoder_spec(
        config,
        "gpt_oss",
        [with_attention(layer, sinks=True)] * count,
        windows,
        max_position=131_072,
        eps=("rms_norm_eps", 1e-5),
        experts=replace(_NAMES, transposed=not quantized),
    )
