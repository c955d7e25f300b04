"""Writes a Qwen3 checkpoint of make_model.py as a GGUF file, in BF16 or F16.

    python make_gguf.py MODEL_DIR OUT.gguf [--type bf16]

Needs gguf, which brings NumPy. Only for measuring speed: the file says that its tokenizer splits text as Qwen2's, which
the embedded tokenizer does not.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

UNUSED, NORMAL, CONTROL = 5, 1, 3  # types of a token
TYPES = {
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
}


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Adds the metadata that describe the model's shape."""
    rope_theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta)
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int, eos: int) -> None:
    """Adds the vocabulary, filled up to `vocab_size` with unused tokens."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    texts = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    texts |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    kinds = [CONTROL if i in special else NORMAL if i in texts else UNUSED for i in range(vocab_size)]
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([texts.get(i, f"[PAD{i}]") for i in range(vocab_size)])
    writer.add_token_types(kinds)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(eos)
    writer.add_add_bos_token(False)


def bf16_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and the bits, as uint16, of a safetensors file's tensors. ValueError if one is not in BF16."""
    data = np.memmap(path, np.uint8, "r")
    begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
    header = json.loads(data[8:begin].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is in {entry['dtype']}, and only BF16 can be written")
        first, last = entry["data_offsets"]
        yield name, data[begin + first : begin + last].view(np.uint16).reshape(entry["shape"])


def widened(bits: np.ndarray) -> np.ndarray:
    """The fp32 values of BF16 numbers given as uint16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_gguf(folder: Path, out: Path, type_name: str) -> None:
    """Writes the file. Raises ValueError for another family than Qwen3."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "qwen3":
        raise ValueError(f"{folder}: model_type is {config['model_type']}, and only qwen3 can be written")
    file_type, tensor_type = TYPES[type_name]
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3")
    add_sizes(writer, config)
    writer.add_file_type(file_type)
    add_tokenizer(writer, folder, config["vocab_size"], config["eos_token_id"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for key, bits in bf16_tensors(folder / "model.safetensors"):
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if bits.ndim == 1:
            writer.add_tensor(name, widened(bits))
        else:
            data = bits if type_name == "bf16" else widened(bits).astype(np.float16)
            writer.add_tensor(name, data.view(np.uint8), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--type", choices=TYPES, default="bf16")
    args = parser.parse_args()
    try:
        write_gguf(args.model, args.out, args.type)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
