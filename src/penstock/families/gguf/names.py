"""Names of tensors: llama.cpp's in a GGUF file, and Hugging Face's for the same tensor."""

import re
from collections.abc import Mapping

EXPERT = re.compile(r"(?<=\.experts\.)\d+(?=\.)")
_GATE_UP = ".experts.{}.gate_up_proj."
_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.([a-z][a-z0-9_.]*?)(?:\.(weight|bias))?")

# Before the layers, and after them; and what stands before the number of a layer.
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TRANSFORMER = {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"}
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_OUTER_OF: Mapping[str, Mapping[str, str]] = {
    "gpt2": {**_TRANSFORMER, "position_embd": "transformer.wpe"},
    "falcon": {**_TRANSFORMER, "token_embd": "transformer.word_embeddings"},
    "gptneox": {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
    },
    "gemma4": {
        **_OUTER,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    **dict.fromkeys(("mamba2", "nemotron_h", "nemotron_h_moe"), _BACKBONE),
}
_LAYERS_OF = {
    "gpt2": "transformer.h.",
    "falcon": "transformer.h.",
    "gptneox": "gpt_neox.layers.",
    **dict.fromkeys(("mamba2", "nemotron_h", "nemotron_h_moe"), "backbone.layers."),
}
_LLAMA = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# If a tensor holds the matrices of all experts, {} in its name is the expert's number.
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def _mlp_of(place: str, suffix: str) -> dict[str, str]:
    """The three matrices of an MLP. `suffix` is that of llama.cpp's names."""
    return {f"ffn_{part}{suffix}": f"{place}.{part}_proj" for part in ("gate", "up", "down")}


_QWEN_MOE = {
    "ffn_gate_inp": "mlp.gate",
    **_mlp_of("mlp.experts.{}", "_exps"),
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **_mlp_of("mlp.shared_expert", "_shexp"),
}
_LLAMA4 = {
    **_mlp_of("feed_forward", ""),
    "ffn_gate_inp": "feed_forward.router",
    **_mlp_of("feed_forward.experts.{}", "_exps"),
    **_mlp_of("feed_forward.shared_expert", "_shexp"),
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_GEMMA,
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    **_mlp_of("mlp.experts.{}", "_exps"),
    "ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **_mlp_of("mlp.experts.{}", "_exps"),
    **_mlp_of("shared_mlp", "_shexp"),
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
_NEXT = {  # of layers that predict a token further on
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_BIASED_MOE = {  # the choice of experts has a bias
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **_mlp_of("mlp.experts.{}", "_exps"),
    **_mlp_of("mlp.shared_experts", "_shexp"),
}
_GLM4_MOE = {"post_attention_norm": "post_attention_layernorm", **_BIASED_MOE, **_NEXT}
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_k_b": "self_attn.k_b_proj",  # kv_b_proj of a checkpoint in two: see kinds/latent.py
    "attn_v_b": "self_attn.v_b_proj",
    **_BIASED_MOE,
}
_GPT_OSS = {
    "attn_sinks.weight": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    **_mlp_of("mlp.experts.{}", "_exps"),
}
_GPT2 = {
    "attn_norm": "ln_1",
    "ffn_norm": "ln_2",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT_NEOX = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_output": "attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "ln_attn",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def _mamba(mixer: str) -> dict[str, str]:
    """The tensors of a layer with a state of Mamba 2, which a checkpoint calls so."""
    names = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    names |= {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return {ours: f"{mixer}.{theirs}" for ours, theirs in names.items()}


_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",  # in_proj_qkvz of a checkpoint in two
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    **_mamba("linear_attn"),
    **_NEXT,
}
_NEMOTRON_H = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "ffn_norm": "post_attention_layernorm",  # of a layer that predicts a token further on, as are the following
    **_mamba("mixer"),
    **_NEXT,
}
_BY_ARCHITECTURE: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("mistral3", "qwen2", "qwen3", "gemma", "granite", "smollm3", "command-r", "cohere2"), _LLAMA),
    "llama": _LLAMA | _MIXTRAL,
    "llama4": _LLAMA | _LLAMA4,
    **dict.fromkeys(("qwen2moe", "qwen3moe"), _LLAMA | _QWEN_MOE),
    **dict.fromkeys(("gemma2", "gemma3", "olmo2"), _LLAMA | _GEMMA),
    "gemma4": _LLAMA | _GEMMA4,
    "granitemoe": _LLAMA | _GRANITE_MOE,
    "seed_oss": _LLAMA | {"post_attention_norm": "post_attention_layernorm"},
    **dict.fromkeys(("phi3", "chatglm"), _LLAMA | _FUSED),
    "glm4": _LLAMA | _GLM4,
    "glm4moe": _LLAMA | _GLM4_MOE,
    "deepseek2": _LLAMA | _DEEPSEEK,
    "starcoder2": _LLAMA | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "gpt2": _GPT2,
    "gptneox": _GPT_NEOX,
    "falcon": _FALCON,
    "gpt-oss": _LLAMA | _GPT_OSS,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), _LLAMA | _QWEN_MOE | _DELTA_NET),
    "granitehybrid": _LLAMA | _GRANITE_MOE | _mamba("mamba"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
    "mamba2": {"attn_norm": "norm"} | _mamba("mixer"),
}

# Tensors that are part of the configuration: see rope.py.
ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)

# Architectures whose q and k llama.cpp's conversion permutes, so that the pairs that rope rotates lie side by side.
INTERLEAVED = frozenset(
    {"llama", "mistral3", "granite", "granitemoe", "granitehybrid", "smollm3", "nemotron_h", "nemotron_h_moe"}
)

# Architectures whose norms are stored with 1 added.
SHIFTED = frozenset({"gemma", "gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"})


def hf_tensor_name(architecture: str, name: str) -> str:
    """Hugging Face's name of a tensor, with {} for an expert's number; the name itself if it is not known."""
    place, _, kind = name.rpartition(".")
    outer = _OUTER_OF.get(architecture, _OUTER)
    if place in outer:
        return f"{outer[place]}.{kind}"
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    number, own, kind = match.groups()
    names, layer = _BY_ARCHITECTURE.get(architecture, {}), f"{_LAYERS_OF.get(architecture, 'model.layers.')}{number}"
    if f"{own}.{kind}" in names:
        return f"{layer}.{names[f'{own}.{kind}']}"
    if own not in names:
        return name
    return f"{layer}.{names[own]}.{kind}" if kind else f"{layer}.{names[own]}"


def halves(name: str) -> tuple[str, ...]:
    """The names of gate and up, if one tensor of a name that `hf_tensor_name` gives has both; else the name alone."""
    if _GATE_UP not in name:
        return (name,)
    return tuple(name.replace(_GATE_UP, _GATE_UP.replace("gate_up", half)) for half in ("gate", "up"))


def is_interleaved(architecture: str, name: str) -> bool:
    """Whether a tensor of a GGUF file has its rows in the order of interleaved rope."""
    match = _LAYER.fullmatch(name)
    return architecture in INTERLEAVED and match is not None and match[2] in ("attn_q", "attn_k")
