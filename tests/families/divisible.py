"""A small model of every family, of sizes that can be divided among ranks: most of them by 4."""

from collections.abc import Mapping
from typing import Any

from penstock.families import ModelSpec, spec_from_config

_SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_QWEN2_MOE = {**_EXPERTS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [1]}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 16, "sliding_window_pattern": 4},
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "sliding_window": 16,
    },
    "gemma4_moe": {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_size_per_layer_input": 0,
        "sliding_window": 16,
        "enable_moe_block": True,
        "num_experts": 8,
        "moe_intermediate_size": 32,
    },
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
    "qwen2_moe": {"architectures": ["Qwen2MoeForCausalLM"], **_QWEN2_MOE},
    # Tensors of another form: heads fused by group, transposed matrices, halves and heads fused, rows in another order.
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"]},
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_inner": 96},
    "falcon": {"architectures": ["FalconForCausalLM"], "new_decoder_architecture": True, "num_kv_heads": 4},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "glm4": {"architectures": ["Glm4ForCausalLM"]},
    "cohere": {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "num_local_experts": 8, "intermediate_size": 80},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **_EXPERTS, "tie_word_embeddings": True},
}


def spec_of(family: str, **changes: Any) -> ModelSpec:
    return spec_from_config({**_SIZES, **CONFIGS[family], **changes})


def stacked_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of tensors in a checkpoint, from those of the tensors that sources name: `name[i]` is a matrix of
    one."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        stack, is_part, _ = name.partition("[")
        found[stack] = (found.get(stack, (0,))[0] + 1, *shape) if is_part else shape
    return found
