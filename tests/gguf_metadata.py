"""The keys of a GGUF file's metadata, as llama.cpp's conversion writes them for a config.json."""

import math
from collections.abc import Mapping
from typing import Any

from gguf import RopeScalingType

STATES = ("qwen3next", "qwen35", "qwen35moe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "mamba2")
_WINDOWS = ("gemma2", "gemma3", "llama", "phi3", "cohere2", "olmo2", "gpt-oss", "gemma4")
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
_WIDTHS = ("intermediate_size_mlp", "ffn_hidden_size", "n_inner", "intermediate_size")


def metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The keys of a model's configuration. Integers are written as uint32, floats as float32."""
    if arch == "mamba2":
        return mamba2_metadata(config)
    renamed = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    config = {**config, **{ours: config[theirs] for ours, theirs in renamed.items() if theirs in config}}
    rope = config.get("rope_parameters") or {}
    near, rope = rope.get("sliding_attention"), rope.get("full_attention", rope)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rms = not any("layer_norm_eps" in name or name == "norm_epsilon" for name in config)
    eps = next(config[name] for name in _EPSILONS if name in config)
    head_dim = config.get("head_dim") or hidden // heads
    layers = config["num_hidden_layers"] if "num_hidden_layers" in config else len(config["layers_block_type"])
    own = {
        "block_count": layers,
        "context_length": config.get("max_position_embeddings") or config["n_positions"],
        "embedding_length": hidden,
        "feed_forward_length": next(config[name] for name in _WIDTHS if config.get(name)),
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads(config) if arch not in ("gpt2", "gptneox") else None,
        f"attention.layer_norm_{'rms_' if rms else ''}epsilon": float(eps),
        "rope.freq_base": float(rope["rope_theta"]) if rope else None,
        "rope.freq_base_swa": float(near["rope_theta"]) if near else None,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)) if rope else None,
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attention.scale": config.get("attention_multiplier"),
        "embedding_scale": config.get("embedding_multiplier"),
        "residual_scale": config.get("residual_multiplier"),
        "logit_scale": config.get("logits_scaling", config.get("logit_scale")),
        "use_parallel_residual": config.get("use_parallel_residual"),
        "attention.key_length": head_dim if config.get("head_dim") and arch != "chatglm" else None,
        "attention.value_length": head_dim if config.get("head_dim") and arch != "chatglm" else None,
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "interleave_moe_layer_step": config.get("interleave_moe_layer_step"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get(
            "intermediate_size" if arch in ("gpt-oss", "llama4") else "moe_intermediate_size"
        ),
        "expert_shared_feed_forward_length": config.get(
            "shared_expert_intermediate_size", config.get("shared_intermediate_size")
        ),
    }
    if rope.get("rope_type") == "linear":
        own |= {"rope.scaling.type": RopeScalingType.LINEAR.value, "rope.scaling.factor": float(rope["factor"])}
    if arch == "glm4moe":
        own |= {
            "expert_count": config.get("n_routed_experts") or config["num_local_experts"],
            "expert_shared_count": config["n_shared_experts"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_gating_func": 2,
        }
    if arch == "deepseek2":
        own |= latent_metadata(config)
    if arch == "gemma4":
        own |= gemma4_metadata(config)
    if arch in STATES:
        own |= state_metadata(config, arch)
    if rope.get("rope_type") == "yarn":
        own |= {
            "rope.scaling.type": RopeScalingType.YARN.value,
            "rope.scaling.factor": float(rope["factor"]),
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": float(rope["beta_fast"]),
            "rope.scaling.yarn_beta_slow": float(rope["beta_slow"]),
        }
    if arch == "mistral3":
        own |= {
            "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
            "attention.temperature_scale": rope["llama_4_scaling_beta"],
        }
    if rope.get("rope_type") == "longrope":
        positions, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
        own |= {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(positions / original) / math.log(original)),
        }
    if arch in _WINDOWS and config.get("sliding_window"):
        own["attention.sliding_window"] = config["sliding_window"]
    if arch == "gemma3" and config["layer_types"] != [
        "full_attention" if i % 6 == 5 else "sliding_attention" for i in range(config["num_hidden_layers"])
    ]:
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if arch in ("olmo2", "cohere2", "gpt-oss") and "layer_types" in config:
        own["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config["layer_types"]]
    if arch in ("llama", "mistral3"):
        own["vocab_size"] = config["vocab_size"]
    return {f"{arch}.{key}": value for key, value in own.items()}


def global_sizes(config: Mapping[str, Any]) -> Mapping[str, int]:
    """The sizes of Gemma 4's layers with full attention."""
    sizes: Mapping[str, int] = next(iter(config["per_layer_config"].values()))
    return sizes


def gemma4_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model whose layers have sizes of their own. Those without `_swa` are of full attention."""
    sizes, near, width = global_sizes(config), config["head_dim"], config["intermediate_size"]
    far, sliding = sizes["head_dim"], [kind == "sliding_attention" for kind in config["layer_types"]]
    kv_heads, shared = config["num_key_value_heads"], config["num_kv_shared_layers"]
    full_heads = sizes.get("num_key_value_heads", kv_heads)
    own = config["num_hidden_layers"] - shared
    wide = config["use_double_wide_mlp"]
    return {
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "attention.sliding_window_pattern": sliding,
        "attention.key_length": far,
        "attention.value_length": far,
        "attention.key_length_swa": near,
        "attention.value_length_swa": near,
        "attention.head_count_kv": [kv_heads if slides else full_heads for slides in sliding],
        "feed_forward_length": [width * (2 if i >= own else 1) for i in range(len(sliding))] if wide else width,
        "rope.dimension_count": far,
        "rope.dimension_count_swa": near,
        "expert_used_count": config["top_k_experts"],
    }


def latent_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model with latent attention, in place of those of keys and values."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    is_v3 = config["model_type"] == "deepseek_v3"
    multiplier = config["rope_parameters"].get("mscale_all_dim")
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotated,
        "rope.scaling.yarn_log_multiplier": 0.1 * multiplier if multiplier else None,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_count": config.get("n_routed_experts") or config["num_local_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config.get("norm_topk_prob") or None,
        "expert_gating_func": 2 if is_v3 else 1,
    }


def state_metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """The keys of a model whose layers keep states."""

    def found(*names: str) -> Any:
        return next(config[name] for name in names if name in config)

    heads = found("linear_num_value_heads", "mamba_num_heads", "mamba_n_heads", "num_heads")
    head_dim = found("linear_value_head_dim", "mamba_head_dim", "mamba_d_head", "head_dim")
    keys = {
        "ssm.conv_kernel": found("linear_conv_kernel_dim", "conv_kernel", "mamba_d_conv"),
        "ssm.state_size": found("linear_key_head_dim", "ssm_state_size", "mamba_d_state", "state_size"),
        "ssm.group_count": found("linear_num_key_heads", "n_groups", "mamba_n_groups"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * head_dim,
    }
    if "linear_key_head_dim" in config:
        recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
        keys |= {"attention.recurrent_layers": recurrent, "full_attention_interval": 4}
        return keys if arch == "qwen3next" else keys | {"rope.dimension_sections": [11, 11, 10, 0]}
    if arch == "mamba2":
        return keys
    kinds = config.get("layers_block_type") or config["layer_types"]
    attention = [config["num_key_value_heads"] * (kind in ("attention", "full_attention")) for kind in kinds]
    keys |= {"attention.head_count_kv": attention}
    if arch == "granitehybrid":
        return keys | {"rope.scaling.finetuned": False}
    keys |= {"feed_forward_length": [config["intermediate_size"] * (kind in ("mlp", "moe")) for kind in kinds]}
    if arch == "nemotron_h":
        return keys
    return keys | {
        "expert_count": config.get("n_routed_experts") or config["num_local_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "moe_latent_size": config.get("moe_latent_size"),
    }


def mamba2_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """All keys of a model without attention."""
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings", 262_144),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": float(config["layer_norm_epsilon"]),
        **state_metadata(config, "mamba2"),
    }
    return {f"mamba2.{key}": value for key, value in own.items()}


def kv_heads(config: Mapping[str, Any]) -> int:
    if "multi_query" in config:  # Falcon
        return int(config["num_kv_heads"] if config["new_decoder_architecture"] or not config["multi_query"] else 1)
    return int(config["num_key_value_heads"])
