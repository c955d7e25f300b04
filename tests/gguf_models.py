"""GGUF files made of tiny checkpoints (see tests.checkpoints) with the gguf package, as llama.cpp's conversion does."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from gguf import (
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
    quants,
)
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES
from numpy.typing import NDArray

from tests.gguf.blocks import random_rows
from tests.gguf_forms import REFORM
from tests.gguf_metadata import global_sizes, metadata

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "llama4_text": "llama4",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "phi3": "phi3",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "glm": "chatglm",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "starcoder2": "starcoder2",
    "gpt2": "gpt2",
    "gpt_neox": "gptneox",
    "falcon": "falcon",
    "gpt_oss": "gpt-oss",
    "olmo3": "olmo2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma4_text": "gemma4",
    "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h",
    "mamba2": "mamba2",
}
# Variants that a GGUF file can describe: llama.cpp fixes what the others change (windows of Qwen, dense layers).
REPRESENTABLE = (
    "llama2",
    "llama3",
    "llama_bias",
    "llama_linear",
    "qwen2",
    "qwen3",
    "qwen3_bias",
    "mistral",
    "mistral_window",
    "ministral3",
    "ministral3_far",
    "gemma3",
    "gemma3_linear",
    "mixtral",
    "mixtral_window",
    "qwen2_moe_plain",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "granite",
    "olmo2",
    "smollm3_every_fourth",
    "seed_oss",
    "seed_oss_bias",
    "phi3",
    "cohere",
    "cohere_plus",
    "cohere2",
    "glm",
    "glm4",
    "glm4_moe",
    "starcoder2",
    "olmo3",
)
# And those whose tensors have another form in a file, or whose tensors are part of the configuration.
REFORMED = (
    "phi3_long",
    "gpt2",
    "gpt_neox",
    "falcon",
    "falcon_grouped",
    "gpt_oss",
    "granite_moe",
    "granite_moe_shared",
    "llama4_normed",
    "deepseek_v2",
    "deepseek_v3",
    "gemma4",
    "gemma4_moe",
    "gemma4_shared",
    "qwen3_next_plain",
    "granite_4_hybrid",
    "granite_4_mamba",
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_latent",
    "mamba2",
)
# And those whose value heads are in another order, so that parameters differ from the checkpoint's.
REORDERED = ("qwen3_5", "qwen3_5_moe")
PERMUTED = ("llama", "mistral3", "granite", "granitemoe", "smollm3", "granitehybrid", "nemotron_h", "nemotron_h_moe")


Written = Callable[..., Path]


def writer(tiny_checkpoint: Callable[..., Path], folder: Path) -> Written:
    """written(variant, **options of write_gguf) gives a file made of a tiny checkpoint."""

    def write(variant: str, **options: Any) -> Path:
        return write_gguf(tiny_checkpoint(variant), folder / f"{variant}.gguf", **options)

    return write


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] | None = None,
    split_tensors: int = 0,
    changes: Mapping[str, Any] | None = None,
    edit: Callable[[dict[str, NDArray[np.float32]]], object] = lambda tensors: None,
) -> Path:
    """Write the float32 checkpoint in `folder` as a GGUF file, or as several with `split_tensors` in each; returns the
    first.

    Matrices are of type `kind`, or F16 if rows have no whole blocks of it; vectors and routers are F32. `kinds` has
    other types, by name. `changes` are keys to write instead; None: not at all. `edit` may change the tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    if arch == "nemotron_h" and "moe" in config["layers_block_type"]:
        arch = "nemotron_h_moe"
    writer = GGUFWriter(path, arch, split_max_tensors=split_tensors)
    for key, value in {**metadata(config, arch), **tokenizer_metadata(folder, config), **(changes or {})}.items():
        if value is not None:
            _add(writer, key, value)
    stored = tensors(folder, config, arch)
    edit(stored)
    for name, tensor in stored.items():
        precise = (".ffn_gate_inp", ".ssm_a", ".ssm_d", ".ssm_norm", ".ssm_conv1d")
        wanted = "F32" if tensor.ndim == 1 or any(each in name for each in precise) else kind
        if tensor.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[wanted]][0]:
            wanted = "F16"
        raw = GGMLQuantizationType[(kinds or {}).get(name, wanted)]
        writer.add_tensor(name, _encoded(name, tensor, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if not split_tensors else next(iter(sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))))


def tokenizer_metadata(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a byte-level BPE tokenizer. Tokens that the model has and the tokenizer lacks are unused."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {entry["content"] for entry in tokenizer["added_tokens"]}
    vocab = {**tokenizer["model"]["vocab"], **{entry["content"]: entry["id"] for entry in tokenizer["added_tokens"]}}
    by_id = {number: text for text, number in vocab.items()}
    size = config["vocab_size"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    kinds = [
        TokenType.UNUSED if i not in by_id else TokenType.CONTROL if by_id[i] in special else TokenType.NORMAL
        for i in range(size)
    ]
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    eos = config["eos_token_id"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [by_id.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": eos[0] if isinstance(eos, list) else eos,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": settings.get("chat_template"),
    }


def tensors(folder: Path, config: Mapping[str, Any], arch: str) -> dict[str, NDArray[np.float32]]:
    """The tensors by llama.cpp's names, in its order of rows."""
    from safetensors.numpy import load_file

    stored: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    by_name = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    layers = config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"])
    names = get_tensor_name_map(MODEL_ARCH(by_name[arch]), layers)
    rope = config.get("rope_parameters") or {}
    if arch in REFORM:
        stored = dict(each for name, tensor in stored.items() for each in REFORM[arch](name, tensor, config))
    found: dict[str, NDArray[np.float32]] = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, tensor in stored.items():
        if re.search(r"experts\.\d", name):
            before, after = name.split("experts.")
            number, which, kind = after.split(".")
            experts.setdefault(f"{before}experts.{which}.{kind}", {})[int(number)] = tensor
            continue
        if arch in PERMUTED and name.rsplit(".", 2)[-2] in ("q_proj", "k_proj"):
            count = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            tensor = permuted(tensor, count)
        if arch in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        found[_mapped(names, name.replace("correction_bias", "correction.bias"))] = tensor
    for name, each in experts.items():
        merged = name.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
        merged = name if arch != "llama" else merged
        merged = re.sub(r"backbone\.(layers\.\d+)\.mixer", r"model.\1.mlp", merged)
        found[_mapped(names, merged)] = np.stack([each[i] for i in range(len(each))])
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            found[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    if arch == "gemma4":
        half = global_sizes(config)["head_dim"] // 2
        turning = int(half * rope["full_attention"]["partial_rotary_factor"])
        found["rope_freqs.weight"] = np.array([1.0] * turning + [1e30] * (half - turning), np.float32)
    if rope.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = llama3_factors(rope, config.get("head_dim") or found_head_dim(config))
    return found


def found_head_dim(config: Mapping[str, Any]) -> int:
    return int(config["hidden_size"] // config["num_attention_heads"])


def permuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """The rows of q or k in llama.cpp's order: row (head, s, i) becomes row (head, i, s)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    """The factors that the frequencies are divided by, computed in float32."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float32(rope["rope_theta"]) ** exponents).astype(np.float32)
    positions, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        wave = np.float32(2 * math.pi) / frequency
        if wave < positions / high:
            factors.append(1.0)
        elif wave > positions / low:
            factors.append(rope["factor"])
        else:
            smooth = np.float32((np.float32(positions) / wave - low) / (high - low))
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _encoded(name: str, tensor: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[Any]:
    try:
        return np.asarray(quants.quantize(tensor, kind))
    except NotImplementedError:
        rows = random_rows(kind.name, math.prod(tensor.shape[:-1]), tensor.shape[-1], seed=crc32(name.encode()))
        return rows.reshape(*tensor.shape[:-1], -1)


def _mapped(names: Any, name: str) -> str:
    mapped = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
    assert mapped is not None, name
    return str(mapped)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
