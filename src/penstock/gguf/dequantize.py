"""Rows of quantised tensors as fp32, with NumPy: for machines without the native kernels.

The layouts of blocks are those of llama.cpp's ggml-common.h. Operations are in the order of gguf's Python package, so
that the bits are the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.gguf.types import TYPES

Blocks = NDArray[np.void]  # [n], of a type in LAYOUTS
Codes = NDArray[np.uint8]  # [n, values]
Floats = NDArray[np.float32]

PIECE = 1 << 20  # values that are computed at once: bounds the memory used besides the result
IQ4_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FP4_TABLE = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # e2m1, doubled

_K_SCALES = [("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12)]
LAYOUTS: Mapping[str, np.dtype[np.void]] = {
    name: np.dtype(fields)
    for name, fields in {
        "Q4_0": [("d", "<f2"), ("low", "u1", 16)],
        "Q4_1": [("d", "<f2"), ("min", "<f2"), ("low", "u1", 16)],
        "Q5_0": [("d", "<f2"), ("high", "u1", 4), ("low", "u1", 16)],
        "Q5_1": [("d", "<f2"), ("min", "<f2"), ("high", "u1", 4), ("low", "u1", 16)],
        "Q8_0": [("d", "<f2"), ("values", "i1", 32)],
        "Q2_K": [("scales", "u1", 16), ("low", "u1", 64), ("d", "<f2"), ("dmin", "<f2")],
        "Q3_K": [("high", "u1", 32), ("low", "u1", 64), ("scales", "u1", 12), ("d", "<f2")],
        "Q4_K": [*_K_SCALES, ("low", "u1", 128)],
        "Q5_K": [*_K_SCALES, ("high", "u1", 32), ("low", "u1", 128)],
        "Q6_K": [("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")],
        "IQ4_NL": [("d", "<f2"), ("low", "u1", 16)],
        "IQ4_XS": [("d", "<f2"), ("scales_high", "u1", 2), ("scales_low", "u1", 4), ("low", "u1", 128)],
        "MXFP4": [("exponent", "u1"), ("low", "u1", 16)],
    }.items()
}


def dequantize(dtype: str, data: NDArray[np.uint8], rows: int, k: int) -> Floats:
    """The values [rows, k] of the `rows` rows that `data` holds one behind the other."""
    if dtype not in LAYOUTS:
        raise ValueError(f"type {dtype}: only {', '.join(LAYOUTS)} are read")
    kind = TYPES[dtype]
    if rows < 0 or k < 0 or k % kind.block_values:
        raise ValueError(f"{rows} rows of {k} values: {dtype} has blocks of {kind.block_values} values")
    needed = rows * kind.row_bytes(k)
    if data.dtype != np.uint8 or data.size != needed:
        raise ValueError(f"{data.size} items of {data.dtype} for {rows} rows of {k} values: {needed} bytes are needed")
    blocks = np.ascontiguousarray(data).reshape(-1).view(LAYOUTS[dtype])
    out = np.empty((len(blocks), kind.block_values), np.float32)
    at_once = PIECE // kind.block_values
    with np.errstate(invalid="ignore", over="ignore"):  # of scales that are infinite, NaN or too large
        for start in range(0, len(blocks), at_once):
            piece = slice(start, start + at_once)
            out[piece] = _VALUES[dtype](blocks[piece])
    return out.reshape(rows, k)


def _unpack(packed: Codes, bits: int, run: int) -> Codes:
    """Codes [n, values] of `bits` bits in bytes [n, bytes]. Each run of `run` bytes holds that many codes in its lowest
    bits, then as many in the next bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = packed.reshape(len(packed), -1, 1, run) >> shifts & np.uint8(2**bits - 1)
    return codes.reshape(len(packed), -1)


def _scaled(scales: Floats, values: NDArray[Any]) -> Floats:
    """Values [n, values] times their group's scale [n, groups]."""
    grouped = values.astype(np.float32).reshape(*scales.shape, -1)
    return (scales[:, :, None] * grouped).reshape(len(values), -1)


def _half(numbers: NDArray[np.float16]) -> Floats:
    return numbers.astype(np.float32)[:, None]


def _signed(codes: Codes, zero: int) -> NDArray[np.int8]:
    return codes.view(np.int8) - np.int8(zero)


def _five_bits(blocks: Blocks) -> Codes:
    return _unpack(blocks["low"], 4, 16) | _unpack(blocks["high"], 1, 1) << np.uint8(4)


def _q4_0(blocks: Blocks) -> Floats:
    return _scaled(_half(blocks["d"]), _signed(_unpack(blocks["low"], 4, 16), 8))


def _q4_1(blocks: Blocks) -> Floats:
    return _scaled(_half(blocks["d"]), _unpack(blocks["low"], 4, 16)) + _half(blocks["min"])


def _q5_0(blocks: Blocks) -> Floats:
    return _scaled(_half(blocks["d"]), _signed(_five_bits(blocks), 16))


def _q5_1(blocks: Blocks) -> Floats:
    return _scaled(_half(blocks["d"]), _five_bits(blocks)) + _half(blocks["min"])


def _q8_0(blocks: Blocks) -> Floats:
    return _scaled(_half(blocks["d"]), blocks["values"])


def _iq4_nl(blocks: Blocks) -> Floats:
    return _scaled(_half(blocks["d"]), IQ4_TABLE[_unpack(blocks["low"], 4, 16)])


def _mxfp4(blocks: Blocks) -> Floats:
    # The table is doubled: 128 instead of the bias, 127.
    scales = np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128)
    return _scaled(scales[:, None], FP4_TABLE[_unpack(blocks["low"], 4, 16)])


def _with_mins(blocks: Blocks, scales: NDArray[Any], mins: NDArray[Any], codes: Codes) -> Floats:
    """K types whose min is subtracted: scales and mins [n, groups], codes [n, 256]."""
    shifts = np.repeat(_half(blocks["dmin"]) * mins.astype(np.float32), codes.shape[1] // mins.shape[1], axis=1)
    return _scaled(_half(blocks["d"]) * scales.astype(np.float32), codes) - shifts


def _six_bits(packed: Codes) -> tuple[Codes, Codes]:
    """Eight scales and eight mins in 12 bytes. The first four of each are in bytes 0 to 3 and 4 to 7, whose upper two
    bits with the halves of bytes 8 to 11 are the last four."""
    scales, mins, halves = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    last_scales, last_mins = halves & 15 | scales >> 2 & 48, halves >> 4 | mins >> 2 & 48
    return np.concatenate((scales & 63, last_scales), 1), np.concatenate((mins & 63, last_mins), 1)


def _q2_k(blocks: Blocks) -> Floats:
    return _with_mins(blocks, blocks["scales"] & 15, blocks["scales"] >> 4, _unpack(blocks["low"], 2, 32))


def _q3_k(blocks: Blocks) -> Floats:
    packed = blocks["scales"]
    scales = _signed(_unpack(packed[:, :8], 4, 8) | _unpack(packed[:, 8:], 2, 4) << np.uint8(4), 32)
    codes = _unpack(blocks["low"], 2, 32) | _unpack(blocks["high"], 1, 32) << np.uint8(2)
    return _scaled(_half(blocks["d"]) * scales.astype(np.float32), _signed(codes, 4))


def _q4_k(blocks: Blocks) -> Floats:
    return _with_mins(blocks, *_six_bits(blocks["scales"]), _unpack(blocks["low"], 4, 32))


def _q5_k(blocks: Blocks) -> Floats:
    codes = _unpack(blocks["low"], 4, 32) | _unpack(blocks["high"], 1, 32) << np.uint8(4)
    return _with_mins(blocks, *_six_bits(blocks["scales"]), codes)


def _q6_k(blocks: Blocks) -> Floats:
    codes = _unpack(blocks["low"], 4, 64) | _unpack(blocks["high"], 2, 32) << np.uint8(4)
    return _scaled(_half(blocks["d"]) * blocks["scales"].astype(np.float32), _signed(codes, 32))


def _iq4_xs(blocks: Blocks) -> Floats:
    scales = _unpack(blocks["scales_low"], 4, 1) | _unpack(blocks["scales_high"], 2, 1) << np.uint8(4)
    scaled = _half(blocks["d"]) * _signed(scales, 32).astype(np.float32)
    return _scaled(scaled, IQ4_TABLE[_unpack(blocks["low"], 4, 16)])


_VALUES: Mapping[str, Callable[[Blocks], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
