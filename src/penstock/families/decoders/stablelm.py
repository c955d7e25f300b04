"""StableLM and Phi 1 to 2: LayerNorm, and a part of each head is rotated. In Phi, and in some StableLM, attention and
MLP are parallel behind one norm. StableLM 2 12B norms heads, each with a weight of its own."""

from dataclasses import replace

from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import NAMES, decoder_spec, layer_spec
from penstock.families.rope_config import rope
from penstock.families.spec import ModelSpec

_ONE_NORM = {"attention_norm": "input_layernorm"}
_STABLELM = replace(NAMES, head_norms=("q_layernorm.norms.{}.weight", "k_layernorm.norms.{}.weight"))
_PHI = replace(
    NAMES, norm="model.final_layernorm", norms=_ONE_NORM, output="dense", up=("fc1",), down="fc2", head_bias=True
)


def stablelm(config: HFConfig) -> ModelSpec:
    parallel = config.flag("use_parallel_residual")
    layer = layer_spec(
        config,
        rope_spec=rope(config, partial=0.25),
        qkv_bias=config.flag("use_qkv_bias"),
        qk_norm="centered" if config.flag("qk_layernorm") else "",
        parallel=parallel,
        shared_norm=parallel,
    )
    return decoder_spec(
        config,
        "stablelm",
        layer,
        max_position=4096,
        layer_norm=True,
        norm_bias=True,
        eps=("layer_norm_eps", 1e-5),
        names=replace(_STABLELM, norms=_ONE_NORM) if parallel else _STABLELM,
    )


def phi(config: HFConfig) -> ModelSpec:
    config.refuse("qk_layernorm", "heads that are not normed")
    layer = layer_spec(
        config,
        act=("hidden_act", "gelu_new"),
        rope_spec=rope(config, partial=0.5),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        gated=False,
        parallel=True,
        shared_norm=True,
    )
    return decoder_spec(
        config,
        "phi",
        layer,
        max_position=2048,
        layer_norm=True,
        norm_bias=True,
        eps=("layer_norm_eps", 1e-5),
        names=_PHI,
    )
