"""Rows of GGUF tensors as fp32, by native code."""

import numpy as np
from numpy.typing import NDArray

from penstock.config.weights import GGUF_FORMATS
from penstock.kernels.native.loader import instruction_sets, native_library
from penstock.kernels.native.packer import FILE_TYPES


def number_of(dtype: str) -> int:
    """The number of a type of GGUF in Stored of cpp/pack.h."""
    if dtype not in GGUF_FORMATS:
        raise ValueError(f"type {dtype}: native code reads {', '.join(GGUF_FORMATS)}")
    return FILE_TYPES.index(dtype)


def dequantize(dtype: str, data: NDArray[np.uint8], rows: int, k: int) -> NDArray[np.float32]:
    """The values [rows, k] of `rows` rows that `data` holds one behind the other, without Python's lock.

    The bits are those of penstock.gguf.dequantize. Raises OSError without native kernels for this processor.
    """
    library = native_library()
    if library is None or not instruction_sets():
        raise OSError("there are no native kernels for this processor")
    number = number_of(dtype)
    if data.dtype != np.uint8 or not data.flags.c_contiguous or rows < 0 or data.size % max(rows, 1):
        raise ValueError(f"{rows} rows in {data.dtype} {list(data.shape)}: contiguous bytes of whole rows are needed")
    row_bytes = data.size // max(rows, 1)
    out = np.empty((rows, max(k, 0)), np.float32)
    if library.penstock_dequantize(number, data.ctypes.data, rows, k, row_bytes, out.ctypes.data):
        raise ValueError(f"a row of {row_bytes} bytes is not {k} values of {dtype}")
    return out
