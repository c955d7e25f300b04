"""Rows of GGUF's quantised types: random blocks, and those of a real file."""

from functools import cache

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.smollm2 import smollm2

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,), "MXFP4": ()}  # where a block has fp16 numbers; others have one at its start
NOTABLE = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00)  # fp16: zero to the largest
LARGEST_EXPONENT = 250  # of MXFP4, for which all values are finite


def sizes(dtype: str) -> tuple[int, int]:
    """The values and the bytes of a block."""
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return values, size


def random_rows(dtype: str, rows: int, k: int, *, seed: int = 0, finite: bool = True) -> NDArray[np.uint8]:
    """Rows [rows, bytes] of random bytes. If `finite`, half the scales are NOTABLE and no other is infinite or NaN."""
    random = np.random.default_rng(seed)
    values, size = sizes(dtype)
    blocks = random.integers(0, 256, (rows * k // values, size), np.uint8)
    if finite:
        for place in HALVES.get(dtype, (0,)):
            exponents, others = random.integers(0, 31, len(blocks)) << 10, random.integers(0, 1 << 16, len(blocks))
            chosen = np.where(random.random(len(blocks)) < 0.5, random.choice(NOTABLE, len(blocks)), exponents)
            chosen = np.where(chosen == exponents, exponents | others & 0x83FF, chosen)
            blocks[:, place : place + 2] = chosen.astype("<u2")[:, None].view(np.uint8)
        if dtype == "MXFP4":
            blocks[:, 0] = random.integers(0, LARGEST_EXPONENT + 1, len(blocks))
            blocks[:3, 0] = range(min(len(blocks), 3))
    return blocks.reshape(rows, -1)


def reference(dtype: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The values of rows by gguf's own code."""
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype])


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """The bits of values, for comparisons in which zero is not minus zero."""
    return np.ascontiguousarray(values).view(np.uint32)


@cache
def real_rows() -> tuple[tuple[str, NDArray[np.uint8]], ...]:
    """The first rows of every quantised tensor of SmolLM2's GGUF, with their type."""
    tensors = [(tensor.tensor_type.name, tensor.data) for tensor in gguf.GGUFReader(smollm2()).tensors]
    return tuple((dtype, np.array(data[:48])) for dtype, data in tensors if dtype in TYPES)
