"""Tensors whose form llama.cpp's conversion changes: split, joined or transposed."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Named = tuple[str, NDArray[np.float32]]


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


REFORM: Mapping[str, Callable[[str, Any, Mapping[str, Any]], Iterator[Named]]] = {
    "gptneox": _by_kind,
    "falcon": _by_kind,
    "gpt2": _turned,
    "granitemoe": _halves,
    "gpt-oss": _of_experts,
    "llama4": _of_experts,
    "deepseek2": _by_head,
}
