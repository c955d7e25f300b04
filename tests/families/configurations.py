"""Configurations of small models, which tests change."""

from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}

MIXTRAL: dict[str, Any] = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
QWEN3_MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LLAMA4: dict[str, Any] = {"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1, 0]}
