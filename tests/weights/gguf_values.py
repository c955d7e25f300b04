"""Small models in GGUF, and the values of any GGUF file by the gguf package: what parameters should be."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from numpy.typing import NDArray
from safetensors.torch import save_file

from penstock.families import spec_from_config
from penstock.families.spec import Parameter
from penstock.kernels.linear import DenseWeight
from penstock.kernels.native.packing import SectionedWeight
from penstock.kernels.triton import weights as device
from tests.checkpoints import write_tokenizer
from tests.families.divisible import CONFIGS
from tests.gguf_models import write_gguf
from tests.kernels.device_weights import dense
from tests.kernels.native.reference import unpacked, words_of

Floats = NDArray[np.float32]
LLAMA = "llama"  # the architecture in which llama.cpp interleaves the rows of q and k

_SIZES: dict[str, Any] = {  # two ranks have whole blocks of 256 columns
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "eos_token_id": 0,
}


def write_model(folder: Path, model_type: str, kinds: dict[str, str], *, kind: str = "Q8_0", **changes: Any) -> Path:
    """Write a model of random weights as a GGUF file. `kinds` are types of tensors by a part of llama.cpp's name."""
    config = {**_SIZES, "model_type": model_type, "architectures": CONFIGS[model_type]["architectures"], **changes}
    spec = spec_from_config(config)
    generator = torch.Generator().manual_seed(1)
    tensors = {
        source.name: torch.randn(source.rows, *parameter.shape[1:], generator=generator)
        for parameter in spec.parameters
        for source in parameter.sources
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    layers = range(config["num_hidden_layers"])
    by_layer = {f"blk.{i}.{part}.weight": name for part, name in kinds.items() for i in layers}
    return write_gguf(folder, folder / "model.gguf", kind=kind, kinds=kinds | by_layer)


class Values:
    """The values of a file's tensors, by Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        self._arch = fields["general.architecture"]
        self._heads = fields[f"{self._arch}.attention.head_count"]
        self._kv_heads = fields[f"{self._arch}.attention.head_count_kv"]
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        arch = {name: number for number, name in MODEL_ARCH_NAMES.items()}[self._arch]
        self._names = gguf.get_tensor_name_map(MODEL_ARCH(arch), fields[f"{self._arch}.block_count"])
        self._decoded = cache(self._decode)

    def types(self, parameter: Parameter) -> set[str]:
        """The types of the tensors that a parameter is made of."""
        names = [self._place(source.name)[0] for source in parameter.sources]
        return {self._tensors[name].tensor_type.name for name in names}

    def of(self, parameter: Parameter) -> Floats:
        """A parameter of a whole model or of a rank."""
        parts = []
        for source in parameter.sources:
            name, expert = self._place(source.name)
            rows = self._decoded(name) if expert is None else self._decoded(name)[expert]
            rows = rows[source.first_row : source.first_row + source.rows]
            columns = (
                slice(source.first_column, source.first_column + source.columns) if source.columns else slice(None)
            )
            parts.append(rows[:, columns] if rows.ndim == 2 else rows)
        return np.concatenate(parts)

    def _place(self, name: str) -> tuple[str, int | None]:
        """llama.cpp's name of a tensor, and the expert whose matrix it is there."""
        number = None
        if found := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            merged, number = f"{found[1]}.{found[3]}.weight", int(found[2])
            name = merged.replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
            name = name if self._arch == LLAMA else merged
        mapped = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert mapped is not None, name
        return mapped, number

    def _decode(self, name: str) -> Floats:
        tensor = self._tensors[name]
        with np.errstate(all="ignore"):
            rows = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if self._arch == LLAMA and (".attn_q." in name or ".attn_k." in name):
            rows = straightened(rows, self._heads if ".attn_q." in name else self._kv_heads)
        return rows


def values_of(weight: Any) -> Floats:
    """The values of a parameter that is fp32, or packed as fp32 or as codes, for a CPU or for a GPU."""
    if isinstance(weight, SectionedWeight | device.JoinedWeight):
        return np.concatenate([values_of(section) for section in weight.sections])
    if isinstance(weight, device.CodedWeight):
        return dense(weight).numpy()
    if isinstance(weight, DenseWeight):
        weight = weight.weight
    if isinstance(weight, torch.Tensor):
        assert weight.dtype == torch.float32
        return weight.numpy()
    if weight.format.scheme == "grouped":
        return unpacked(weight).values()[:, : weight.k]
    assert weight.format.scheme == "f32"
    return words_of(weight).view(np.float32)


def straightened(rows: Floats, heads: int) -> Floats:
    """The rows of q or k in Hugging Face's order: row (head, i, s) becomes row (head, s, i)."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
