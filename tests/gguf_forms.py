"""Tensors whose form llama.cpp's conversion changes: split, joined or transposed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.gguf_metadata import kv_heads

Named = tuple[str, NDArray[np.float32]]


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


def _of_qwen3_5(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """Value heads in another order: the first of each key head, then the second of each."""
    keys, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    shared, values = config["linear_num_value_heads"] // keys, config["linear_num_value_heads"] * size

    def tiled(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows.reshape(keys, shared, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        tensor = np.concatenate([tensor[:-values], tiled(tensor[-values:])])
    elif name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = tiled(tensor)
    elif name.endswith("linear_attn.out_proj.weight"):
        tensor = np.ascontiguousarray(tiled(tensor.T).T)
    yield from _of_states(name, tensor, config)


def _of_gemma4(name: str, tensor: NDArray[np.float32], config: Mapping[str, Any]) -> Iterator[Named]:
    """The scales of a layer's router and experts, and the stacks of experts as they are."""
    scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    for end, stored in scales.items():
        if name.endswith(end):
            name = f"blk.{name.split('.')[2]}.{stored}.scale"
    yield f"{name}.weight" if ".experts." in name or name.endswith("layer_scalar") else name, tensor


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
    "gemma4": _of_gemma4,
    "qwen3next": _of_qwen3_next,
    "qwen35": _of_qwen3_5,
    "qwen35moe": _of_qwen3_5,
    "granitehybrid": _of_granite,
    "nemotron_h": _of_states,
    "nemotron_h_moe": _of_states,
    "mamba2": _of_states,
}
