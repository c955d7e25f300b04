"""The types of tensors in GGUF files: blocks of values of a row, each of a fixed number of bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TensorType:
    """A type by its name and number in the format. A row is a whole number of blocks."""

    name: str
    number: int
    block_values: int
    block_bytes: int

    @property
    def quantized(self) -> bool:
        return self.block_values > 1

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row. `columns` is a multiple of `block_values`."""
        return columns // self.block_values * self.block_bytes


_TYPES = (
    TensorType("F32", 0, 1, 4),
    TensorType("F16", 1, 1, 2),
    TensorType("Q4_0", 2, 32, 18),
    TensorType("Q4_1", 3, 32, 20),
    TensorType("Q5_0", 6, 32, 22),
    TensorType("Q5_1", 7, 32, 24),
    TensorType("Q8_0", 8, 32, 34),
    TensorType("Q2_K", 10, 256, 84),
    TensorType("Q3_K", 11, 256, 110),
    TensorType("Q4_K", 12, 256, 144),
    TensorType("Q5_K", 13, 256, 176),
    TensorType("Q6_K", 14, 256, 210),
    TensorType("IQ4_NL", 20, 32, 18),
    TensorType("IQ4_XS", 23, 256, 136),
    TensorType("BF16", 30, 1, 2),
    TensorType("MXFP4", 39, 32, 17),
)

TYPES: Mapping[str, TensorType] = MappingProxyType({kind.name: kind for kind in _TYPES})
TYPES_BY_NUMBER: Mapping[int, TensorType] = MappingProxyType({kind.number: kind for kind in _TYPES})

# Types of the format that are not read, so that an error can name them.
OTHER_NAMES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
    41: "Q1_0",
}

# Names of general.file_type, which says how a file was made. Source: llama_ftype in llama.cpp's include/llama.h.
FILE_TYPES: Mapping[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    21: "Q2_K_S",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    38: "MXFP4",
}
