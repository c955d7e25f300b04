"""Tensors whose form llama.cpp's conversion changes: split, joined or transposed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Named = tuple[str, NDArray[np.float32]]


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
    if arch == "qwen3next":
        return keys | {"full_attention_interval": config.get("full_attention_interval", 4)}
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


def _by_kind(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """q, k and v of each KV head together: all of q first, then k, then v."""
    if "query_key_value" in name:
        heads = config["num_attention_heads"]
        groups = kv_heads(config) if "multi_query" in config else heads
        rows = tensor.reshape(groups, heads // groups + 2, -1, *tensor.shape[1:])
        tensor = np.concatenate(
            [part.reshape(-1, *tensor.shape[1:]) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])]
        )
    yield name, tensor


def _turned(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    yield name, tensor.T if name.split(".")[-2] in ("c_attn", "c_proj", "c_fc") else tensor


def _halves(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """Granite's fused gate and up, one after the other."""
    kind = "exps" if "block_sparse_moe" in name else "shexp"
    layer = f"blk.{name.split('.')[2]}.ffn_" if ".layers." in name else ""
    if ".input_linear." in name:
        gate, up = np.split(tensor, 2, axis=-2)
        yield f"{layer}gate_{kind}.weight", gate
        yield f"{layer}up_{kind}.weight", up
    else:
        yield (f"{layer}down_{kind}.weight" if ".output_linear." in name else name), tensor


def _of_experts(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """The halves of gpt-oss' and Llama 4's experts, one after the other, and a matrix as [out, in]."""
    if ".experts." not in name:
        yield name + (".weight" if name.endswith("sinks") else ""), tensor
        return
    place, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
    rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if not place.endswith("gate_up_proj"):
        yield f"{place}.{kind}", rows
        return
    width = rows.shape[1] // 2
    halves = (rows[:, ::2], rows[:, 1::2]) if config["model_type"] == "gpt_oss" else (rows[:, :width], rows[:, width:])
    for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
        yield f"{place.replace('gate_up_proj', name)}.{kind}", half


def _by_head(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """What makes keys, each head's transposed, and what makes values, of the one tensor that a checkpoint has."""
    if "kv_b_proj" not in name:
        yield name, tensor
        return
    heads = tensor.reshape(config["num_attention_heads"], -1, tensor.shape[-1])
    keys = config["qk_nope_head_dim"]
    yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(heads[:, :keys].swapaxes(1, 2))
    yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(heads[:, keys:])


def _of_states(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """Tensors of layers with states of Mamba 2 or a delta net."""
    delta = "linear_num_key_heads" in config
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    if name.endswith(("A_log", ".D")) and not delta:
        tensor = tensor[:, None]
    if name.endswith("conv1d.weight"):
        tensor = tensor.squeeze(1)
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.get("n_groups") or config.get("mamba_n_groups")
        tensor = tensor.reshape(groups, -1)
    if delta and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + np.float32(1)
    yield name.replace("dt_bias", "dt.bias" if config["model_type"] == "nemotron_h" else "dt_proj.bias"), tensor


def _of_qwen3_next(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """Queries, keys and values of all heads, and the gates, of the one tensor that has those of each key head."""
    if "in_proj_qkvz" not in name:
        yield from _of_states(name, tensor, config)
        return
    keys, shared = config["linear_key_head_dim"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    values, hidden = shared * config["linear_value_head_dim"], tensor.shape[-1]
    heads = tensor.reshape(config["linear_num_key_heads"], -1, hidden)
    parts = np.split(heads, np.cumsum([keys, keys, values]), axis=1)
    rows = [part.reshape(-1, hidden) for part in parts]
    layer = f"blk.{name.split('.')[2]}"
    yield f"{layer}.attn_qkv.weight", np.concatenate(rows[:3])
    yield f"{layer}.attn_gate.weight", rows[3]


def _of_granite(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    for each, part in _of_states(name, tensor, config):
        for final, half in _halves(each, part, config):
            yield final if config["num_local_experts"] else final.replace("_shexp", ""), half


REFORM: Mapping[str, Callable[[str, Any, Mapping[str, Any]], Iterator[Named]]] = {
    "gptneox": _by_kind,
    "falcon": _by_kind,
    "gpt2": _turned,
    "granitemoe": _halves,
    "gpt-oss": _of_experts,
    "llama4": _of_experts,
    "deepseek2": _by_head,
    "qwen3next": _of_qwen3_next,
    "granitehybrid": _of_granite,
    "nemotron_h": _of_states,
    "nemotron_h_moe": _of_states,
    "mamba2": _of_states,
}
