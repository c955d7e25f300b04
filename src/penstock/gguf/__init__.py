"""GGUF, the file format of llama.cpp: metadata and a table of tensors, checked. No tensor is read here."""

from penstock.gguf.header import GgufError, GgufTensor
from penstock.gguf.parts import GgufFile, PartName, model_name, part_name, read_gguf
from penstock.gguf.types import TYPES, TensorType

__all__ = [
    "TYPES",
    "GgufError",
    "GgufFile",
    "GgufTensor",
    "PartName",
    "TensorType",
    "model_name",
    "part_name",
    "read_gguf",
]
