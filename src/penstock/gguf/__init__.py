"""GGUF, the file format of llama.cpp: metadata and a table of tensors, checked. Tensors are not read here."""

from penstock.gguf.header import GgufError, GgufTensor, read_floats, short
from penstock.gguf.other_files import describe_other, not_a_model
from penstock.gguf.parts import GgufFile, PartName, is_gguf, model_name, part_name, read_gguf
from penstock.gguf.types import TYPES, TensorType
