"""GLM-4: half of each head is rotated, by pairs that lie side by side. The models of 2025 (0414) also norm the outputs
of attention and MLP."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec

_GLM = replace(NAMES, up=("gate_up_proj",))
_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def glm(config: HFConfig) -> ModelSpec:
    return _spec(config, "glm", post_norms=False)


def glm4(config: HFConfig) -> ModelSpec:
    return _spec(config, "glm4", post_norms=True)


def _spec(config: HFConfig, family: str, *, post_norms: bool) -> ModelSpec:
    layer = layer_spec(
        config,
        num_kv_heads=2,
        head_dim=128,
        rope_spec=rope(config, partial=0.5, interleaved=True),
        qkv_bias=config.flag("attention_bias", True),
        post_norms=post_norms,
    )
    names = replace(_GLM, norms=_NORMS) if post_norms else _GLM
    if config.flag("fused_qkv"):  # of a GGUF file
        names = replace(names, heads=("qkv_proj",))
    return decoder_spec(config, family, layer, eps=("rms_norm_eps", 1.5625e-7), names=names)
