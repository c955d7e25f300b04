"""Which type each tensor of a GGUF file gets, as llama.cpp chooses, and the metadata of the file that is made.

Source: llama_tensor_get_type in llama.cpp's src/llama-quant.cpp.
"""

import re
import struct
from collections.abc import Mapping
from pathlib import Path

from penstock.gguf import TYPES, GgufFile, GgufTensor
from penstock.gguf.types import FILE_TYPES

# The type of most matrices in a file of each kind. The _M kinds have better types in some layers.
MOST: Mapping[str, str] = {
    **{name: name for name in ("Q8_0", "Q6_K", "Q4_1", "Q4_0")},
    "Q5_K_M": "Q5_K",
    "Q4_K_M": "Q4_K",
}
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # where rows are not whole blocks of 256
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")
_UINT32, _STRING, _ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def mixed_type(kind: str, tensor: GgufTensor, file: GgufFile) -> str | None:
    """Returns the type of a tensor in a file of a kind such as Q4_K_M, or None for one that is copied."""
    name = tensor.name
    if not name.endswith(".weight") or len(tensor.shape) < 2 or "_norm" in name or "ffn_gate_inp" in name:
        return None
    if name.startswith(("position_embd", "token_types")) or "ssm_" in name or ".shortconv" in name:
        return None
    wanted = MOST[kind]
    if name == "output.weight" or (name == "token_embd.weight" and "output.weight" not in file.tensors):
        wanted = "Q8_0" if kind == "Q8_0" or tensor.shape[-1] % 256 else "Q6_K"
    elif match := _LAYER.fullmatch(name):
        wanted = _of_layer(kind, int(match[1]), match[2], file)
    if tensor.shape[-1] % TYPES[wanted].block_values:
        wanted = _INSTEAD.get(wanted, wanted)
    return None if tensor.shape[-1] % TYPES[wanted].block_values else wanted


def _of_layer(kind: str, layer: int, name: str, file: GgufFile) -> str:
    architecture = file.metadata["general.architecture"]
    layers, experts = (file.metadata.get(f"{architecture}.{key}", 0) for key in ("block_count", "expert_count"))
    most = MOST[kind]
    eighth = layers // 8
    better = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
    if name in ("attn_v", "attn_k", "attn_output") and experts == 8:
        return "Q5_K" if name == "attn_output" and most.endswith("_K") else "Q8_0" if name != "attn_output" else most
    if kind.endswith("_M") and name == "attn_qkv":
        return "Q5_K" if kind == "Q4_K_M" else "Q6_K"
    if name in ("attn_v", "ffn_down", "ffn_down_exps"):
        if kind.endswith("_M") and better:
            return "Q6_K"
        if kind == "Q4_0" and name != "attn_v" and layer < eighth:
            return "Q4_1"
    return most


def file_metadata(path: Path, kind: str) -> dict[str, tuple[int, bytes]]:
    """Returns the type number and the bytes of each value of a file's metadata, as a file of the kind has them. The
    file's header has been checked: penstock.gguf has read it."""
    with path.open("rb") as file:
        _, _, _, count = struct.unpack("<4sIQQ", file.read(24))
        found, take = dict[str, tuple[int, bytes]](), file.read

        def text() -> bytes:
            size = take(8)
            return size + take(int.from_bytes(size, "little"))

        def value(number: int) -> bytes:
            if number == _STRING:
                return text()
            if number != _ARRAY:
                return take(_SIZES[number])
            head = take(12)
            each, length = struct.unpack("<IQ", head)
            if each in _SIZES:
                return head + take(_SIZES[each] * length)
            return head + b"".join(value(each) for _ in range(length))

        for _ in range(count):
            key = text()[8:].decode()
            number = int.from_bytes(take(4), "little")
            found[key] = number, value(number)
    found = {key: each for key, each in found.items() if not key.startswith(("split.", "quantize.imatrix."))}
    number = next(number for number, name in FILE_TYPES.items() if name == kind)
    found["general.file_type"] = _UINT32, struct.pack("<I", number)
    found["general.quantization_version"] = _UINT32, struct.pack("<I", 2)
    return found
