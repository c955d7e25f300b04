"""Tiny random checkpoints of every family, written by transformers, with a tokenizer: folders that can be served.

Weights are drawn so that logits are well spread: greedy tokens do not hang on the last bit, and norms, biases and
scales matter.
"""

import json
import math
from pathlib import Path
from typing import Any

MAX_POSITION = 512
END, START_TURN, END_TURN = 0, 1, 2  # special tokens of the tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 307,  # odd, and larger than the tokenizer's
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {  # with this head size, frequencies fall below, into and above the blended band
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
_GEMMA = {"hidden_size": 72, "num_hidden_layers": 6, "head_dim": 48, "query_pre_attn_scalar": 20, "sliding_window": 16}

_GEMMA4 = {
    "hidden_size": 72,
    "num_hidden_layers": 6,
    "head_dim": 48,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
}

_EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "rms_norm_eps": 1e-3,  # not that of the norms within attention
}
_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0],
    "partial_rotary_factor": 0.75,
}
_GPT2 = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": MAX_POSITION,
    "n_inner": 112,
    "attn_pdrop": 0.0,
}

_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}

_NEMOTRON_MOE = {
    "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
    "head_dim": 32,
    "mamba_num_heads": 6,
    "mamba_head_dim": 24,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
    "layer_norm_epsilon": 1e-2,
}

_DELTA_NET = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rms_norm_eps": 3e-2,  # the norm of a state's output raises rounding errors where it is small
}

# variant: the class's prefix in transformers, and what differs from SIZES
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "rope_parameters": _LLAMA3_ROPE,
            "tie_word_embeddings": True,
            "eos_token_id": [0, 2],
        },
    ),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama_linear": ("Llama", {"rope_parameters": _LINEAR_ROPE, "head_dim": 32, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 48, "tie_word_embeddings": True}),
    "qwen3_bias": ("Qwen3", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral_window": ("Mistral", {"sliding_window": 16}),
    "gemma3": ("Gemma3", {**_GEMMA}),
    "gemma3_linear": (
        "Gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **_GEMMA4,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_moe": (
        "Gemma4",
        {
            **_GEMMA4,
            **_EXPERTS,
            "num_experts_per_tok": None,
            "top_k_experts": 3,
            "enable_moe_block": True,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 64,
        },
    ),
    "gemma4_shared": (
        "Gemma4",
        {
            **_GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 307,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4_separate": (
        "Gemma4",
        {
            **_GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 0, 1],
            "interleave_moe_layer_step": 2,
            "moe_layers": [1, 3],
            "num_local_experts": 6,
            "intermediate_size_mlp": 96,
            "intermediate_size": 48,
            "head_dim": 48,
            "use_qk_norm": False,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "llama4_normed": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
        },
    ),
    "llama4_chunks": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "attention_chunk_size": 21,
            "floor_scale": 13,
            "attn_scale": 0.3,
        },
    ),
    "llama_yarn": ("Llama", {"rope_parameters": _YARN_ROPE, "head_dim": 32, "tie_word_embeddings": False}),
    "llama_dynamic": ("Llama", {"rope_parameters": _DYNAMIC_ROPE, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma2_uncapped": (
        "Gemma2",
        {**_GEMMA, "num_hidden_layers": 2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "phi3": ("Phi3", {"sliding_window": 16}),
    "phi3_long": (
        "Phi3",
        {"rope_parameters": _LONG_ROPE, "original_max_position_embeddings": 256, "tie_word_embeddings": True},
    ),
    "ministral": (
        "Ministral",
        {
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "head_dim": 24,
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **_YARN_ROPE,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 256,
                "factor": 2.0,
            },
            "tie_word_embeddings": False,
        },
    ),
    "ministral3_far": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                **_YARN_ROPE,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
                "factor": 16.0,
            },
        },
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3_every_fourth": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3_window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 16, "attention_bias": True},
    ),
    "seed_oss": ("SeedOss", {"head_dim": 24, "rms_norm_eps": 1e-2}),
    "seed_oss_bias": (
        "SeedOss",
        {
            "head_dim": None,
            "num_key_value_heads": None,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "rope_parameters": _LINEAR_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {"tie_word_embeddings": False}),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 4,
            "sliding_window": 16,
            "rope_parameters": {
                "full_attention": _YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "granite": (
        "Granite",
        {**_GRANITE, "tie_word_embeddings": True},
    ),
    "granite_moe": ("GraniteMoe", {**_GRANITE, "num_local_experts": 6, "intermediate_size": 40}),
    "granite_moe_shared": (
        "GraniteMoeShared",
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 56},
    ),
    "granite_4": (
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 6,
            "shared_intermediate_size": 56,
            "mamba_n_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "granite_4_dense": (
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 88,
            "position_embedding_type": "rope",
            "mamba_n_heads": 16,
        },
    ),
    "granite_4_hybrid": (
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "shared_intermediate_size": 56,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "mamba_n_groups": 2,
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 2,
            "conv_kernel": 3,
            "use_bias": True,
            "layer_norm_epsilon": 1e-2,
            "num_hidden_layers": 2,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
            "head_dim": 32,
            "mamba_num_heads": 6,
            "mamba_head_dim": 24,
            "ssm_state_size": 16,
            "n_groups": 2,
            "layer_norm_epsilon": 1e-2,
        },
    ),
    "nemotron_h_moe": ("NemotronH", _NEMOTRON_MOE),
    "nemotron_h_latent": ("NemotronH", {**_NEMOTRON_MOE, "moe_latent_size": 24, "n_group": 1, "topk_group": 1}),
    "granite_4_mamba": (
        "GraniteMoeHybrid",
        {
            **_GRANITE,
            "layer_types": ["linear_attention"] * 3,
            "use_cache": False,  # transformers' cache needs a layer of attention
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 88,
            "mamba_n_heads": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere_plus": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True, "layer_norm_eps": 1e-2}),
    "cohere2": ("Cohere2", {"logit_scale": 0.7, "num_hidden_layers": 4, "sliding_window": 16}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": True}),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "head_dim": 24,
        },
    ),
    "glm4_moe_grouped": (
        "Glm4Moe",
        {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "attention_bias": True,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {**_YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek_v2_grouped": (
        "DeepseekV2",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "attention_bias": True,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": 24,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "rope_parameters": {**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "rope_interleave": False,
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "starcoder2_window": ("Starcoder2", {"sliding_window": 16, "use_bias": False}),
    "gpt2": ("GPT2", _GPT2),
    "gpt2_scaled": ("GPT2", {**_GPT2, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.25}),
    "gpt_neox_serial": ("GPTNeoX", {"use_parallel_residual": False, "rotary_pct": 1.0, "hidden_act": "gelu_new"}),
    "opt": ("OPT", {"ffn_dim": 112}),
    "falcon": ("Falcon", {"ffn_hidden_size": 112}),
    "falcon_grouped": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon_serial": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "ffn_hidden_size": 112, "tie_word_embeddings": False},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 48,
            "rope_parameters": {**_YARN_ROPE, "rope_theta": 1.5e5, "truncate": False},
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 72}),
    "mixtral_window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 16}),
    "qwen2_moe": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}),
    "qwen2_moe_normed": (
        "Qwen2Moe",
        {
            **_EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 40,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 2,
        },
    ),
    "qwen2_moe_plain": ("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 48, "tie_word_embeddings": True}),
    "qwen3_moe_window": (
        "Qwen3Moe",
        {**_EXPERTS, "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 16, "attention_bias": True},
    ),
    "qwen3_next_plain": ("Qwen3Next", {**_DELTA_NET, **_EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_DELTA_NET,
            **_EXPERTS,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {**_DELTA_NET, "layer_types": None, "linear_num_value_heads": 6, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_DELTA_NET, **_EXPERTS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "qwen3_moe_sparse": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 2, "head_dim": 32}),
}

WITH_OFFSET = ("Gemma", "Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")  # their norms store weight - 1
# Variants whose layers keep states: on one CPU only.
STATES = (
    *("mamba2", "nemotron_h", "nemotron_h_moe", "nemotron_h_latent"),
    *("qwen3_next", "qwen3_next_plain", "qwen3_5", "qwen3_5_moe", "granite_4_hybrid", "granite_4_mamba"),
)
DIVISIBLE = tuple(name for name in VARIANTS if name not in STATES)
# On a GPU. Latents are refused there (config/checks/latents.py).
ON_GPUS = tuple(name for name in DIVISIBLE if not name.startswith("deepseek"))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TEXT = [
    "The pipe that keeps a turbine under full head is called a penstock.",
    "def add(first, second):\n    return first + second\n",
    "Prompts and weights go in, a stream of tokens comes out.",
]


def write_tiny_checkpoint(
    family_variant: str, folder: Path, *, dtype: str = "float32", seed: int = 0, shards: int | None = None
) -> Path:
    """Write a model of VARIANTS and its tokenizer to `folder`; with `shards`, its tensors in so many files."""
    import torch

    model = tiny_model(family_variant, seed=seed).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if shards is not None:
        split_checkpoint(folder, shards)
    write_tokenizer(folder)
    return folder


def tiny_model(family_variant: str, *, seed: int = 0) -> Any:
    """The transformers model of a variant with random fp32 weights, in eval mode."""
    import transformers

    family, changes = VARIANTS[family_variant]
    text = "Text" if family in ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe") else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**SIZES, **changes})
    if getattr(config, "attn_logit_softcapping", None):  # torch's attention, which 5.17 chose, leaves it out
        config._attn_implementation = "eager"
    name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    model = getattr(transformers, name)(config).eval()
    randomise(model, seed, norm_mean=0.0 if family in WITH_OFFSET else 1.0)
    return model


def randomise(model: Any, seed: int, *, norm_mean: float) -> None:
    """Draw every parameter anew, each from a generator of its own so that a variant's other tensors do not matter."""
    import torch

    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            generator = torch.Generator().manual_seed(seed * 1000 + index)
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                mean = 0.0 if name.endswith("bias") else norm_mean
                parameter.copy_(mean + 0.2 * noise)
            else:
                parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                generator = torch.Generator().manual_seed(seed * 1000 + len(name))
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("layer_scalar"):
                generator = torch.Generator().manual_seed(seed * 1000 + sum(name.encode()))
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))


def split_checkpoint(folder: Path, shards: int) -> None:
    """Turn model.safetensors into shards with an index, as large models come."""
    from safetensors.torch import load_file, save_file

    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    places = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        mine = dict(list(tensors.items())[number::shards])
        save_file(mine, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(mine, name))
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with three special tokens, all 256 bytes and a few merges, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 8, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special[END],
        "pad_token": special[END],
        "model_max_length": MAX_POSITION,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
