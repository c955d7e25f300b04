"""Variants whose layers keep states."""

from tests.checkpoints.sizes import EXPERTS, GRANITE, Variants

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

WITH_STATES: Variants = {
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
    "qwen3_next": (
        "Qwen3Next",
        {
            **_DELTA_NET,
            **EXPERTS,
            "shared_expert_intermediate_size": 56,
            "decoder_sparse_step": 2,
            "linear_conv_kernel_dim": 3,
            "attention_bias": True,
        },
    ),
    "qwen3_next_plain": ("Qwen3Next", {**_DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen3_5": (
        "Qwen3_5",
        {**_DELTA_NET, "layer_types": None, "linear_num_value_heads": 6, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_DELTA_NET, **EXPERTS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "granite_4_hybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 6,
            "shared_intermediate_size": 56,
            "mamba_n_heads": 8,
            "mamba_d_state": 24,
            "mamba_n_groups": 2,
        },
    ),
    "granite_4_mamba": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
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
}
