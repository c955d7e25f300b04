"""Variants with attention and MLPs alone."""

from tests.checkpoints.sizes import GEMMA4, GRANITE, LLAMA3_ROPE, MAX_POSITION, YARN_ROPE, Variants

_GEMMA = {"hidden_size": 72, "num_hidden_layers": 6, "head_dim": 48, "query_pre_attn_scalar": 20, "sliding_window": 16}

_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}

_DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}

_MINISTRAL_ROPE = {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
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

DENSE: Variants = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    "llama3": (
        "Llama",
        {
            "num_key_value_heads": 1,
            "rope_parameters": LLAMA3_ROPE,
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
            **GEMMA4,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4_shared": (
        "Gemma4",
        {
            **GEMMA4,
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
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 32,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "llama_yarn": ("Llama", {"rope_parameters": YARN_ROPE, "head_dim": 32, "tie_word_embeddings": False}),
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
                **_MINISTRAL_ROPE,
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
                **_MINISTRAL_ROPE,
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
                "full_attention": YARN_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "granite": (
        "Granite",
        {**GRANITE, "tie_word_embeddings": True},
    ),
    "granite_4_dense": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 88,
            "position_embedding_type": "rope",
            "mamba_n_heads": 16,
        },
    ),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere_plus": ("Cohere", {"logit_scale": 0.5, "use_qk_norm": True, "layer_norm_eps": 1e-2}),
    "cohere2": ("Cohere2", {"logit_scale": 0.7, "num_hidden_layers": 4, "sliding_window": 16}),
    "arcee": ("Arcee", {"mlp_bias": True}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "exaone4": ("Exaone4", {"sliding_window": 16, "num_hidden_layers": 4, "head_dim": 24}),
    "exaone4_full": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "phi": ("Phi", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm_normed": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "layer_norm_eps": 1e-2}),
    "glm": ("Glm", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": True}),
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
}
