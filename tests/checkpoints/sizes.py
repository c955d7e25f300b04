"""Sizes of the tiny checkpoints, and what several of their configurations share."""

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
LLAMA3_ROPE = {  # with this head size, frequencies fall below, into and above the blended band
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA4 = {
    "hidden_size": 72,
    "num_hidden_layers": 6,
    "head_dim": 48,
    "sliding_window": 16,
    "hidden_size_per_layer_input": 0,
}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 1.7,
}

# A variant: the prefix of its class in transformers, and what differs from SIZES.
Variants = dict[str, tuple[str, dict[str, Any]]]
