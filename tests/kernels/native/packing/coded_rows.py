"""Native decoding of GGUF's rows, for tests: the codes of a row, and rows between forbidden pages.

    python -m tests.kernels.native.packing.coded_rows [short]

Decodes rows of all types between forbidden pages (see guarded.py): an access one byte outside ends the process. "short"
is a control that must fail: the last byte of the last row lies in the forbidden page. A line names each type before it
runs.
"""

import ctypes
import sys
from ctypes import c_bool, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native.gguf_rows import number_of
from penstock.kernels.native.loader import native_library
from tests.gguf.blocks import TYPES, bits, random_rows, reference, sizes
from tests.kernels.native.guarded import GuardedMemory

RIGHT_SIZE = "ran on a row of the right size"


class CodeTraits(ctypes.Structure):
    _fields_ = (
        ("bits", c_int32),
        ("group", c_int32),
        ("zero", c_int32),
        ("mins", c_bool),
        ("two_levels", c_bool),
        ("table", c_void_p),
        ("block_values", c_int64),
        ("block_bytes", c_int64),
    )


class CodedRow(ctypes.Structure):
    _fields_ = tuple(
        (name, c_void_p) for name in ("codes", "scales", "mins", "sub_scales", "sub_mins", "super_scales", "super_mins")
    )


class Part(NamedTuple):
    values_per_item: int
    dtype: Any


def functions() -> ctypes.CDLL:
    library = native_library()
    assert library is not None
    library.penstock_code_traits.argtypes = (c_int32,)
    library.penstock_code_traits.restype = c_void_p
    library.penstock_decode.argtypes = (c_int32, c_void_p, c_int64, c_int64, c_void_p)
    library.penstock_decode.restype = c_int64
    library.penstock_dequantize.argtypes = (c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    library.penstock_dequantize.restype = c_int64
    return library


def traits_of(dtype: str) -> CodeTraits:
    return CodeTraits.from_address(functions().penstock_code_traits(number_of(dtype)))


def parts_of(traits: CodeTraits) -> dict[str, Part]:
    """The arrays that a type needs."""
    parts = {"codes": Part(1, np.uint8)}
    for name in ("scales", "mins") if traits.mins else ("scales",):
        if traits.two_levels:
            parts[f"sub_{name}"] = Part(traits.group, np.int8)
            parts[f"super_{name}"] = Part(256, np.float16)
        else:
            parts[name] = Part(traits.group, np.float32)
    return parts


def decode(dtype: str, row: int, k: int, row_bytes: int, *, at_end: bool = True) -> dict[str, NDArray[Any]]:
    """The parts of the row at an address. They are written between forbidden pages; others have no address."""
    memory = {
        name: (part, GuardedMemory(k // part.values_per_item * np.dtype(part.dtype).itemsize, at_end=at_end))
        for name, part in parts_of(traits_of(dtype)).items()
    }
    coded = CodedRow(**{name: place.address for name, (_, place) in memory.items()})
    assert functions().penstock_decode(number_of(dtype), row, k, row_bytes, ctypes.addressof(coded)) == 0
    written = {}
    for name, (part, place) in memory.items():
        size = k // part.values_per_item * np.dtype(part.dtype).itemsize
        written[name] = np.frombuffer(ctypes.string_at(place.address, size), part.dtype)
        place.close()
    return written


def run_guarded(dtype: str, *, at_end: bool) -> None:
    values, size = sizes(dtype)
    for blocks in (1, 3):
        k, row_bytes = blocks * values, blocks * size
        data = random_rows(dtype, 2, k)
        want = reference(dtype, data)
        memory, out = GuardedMemory(data.nbytes, at_end=at_end), GuardedMemory(want.nbytes, at_end=at_end)
        ctypes.memmove(memory.address, data.ctypes.data, data.nbytes)
        assert not functions().penstock_dequantize(number_of(dtype), memory.address, 2, k, row_bytes, out.address)
        got = np.frombuffer(ctypes.string_at(out.address, want.nbytes), np.float32)
        np.testing.assert_array_equal(bits(got), bits(want.reshape(-1)))
        for row in range(2):
            decode(dtype, memory.address + row * row_bytes, k, row_bytes, at_end=at_end)
        memory.close()
        out.close()


def overrun(dtype: str) -> None:
    """Rows whose last byte lies in a forbidden page."""
    values, size = sizes(dtype)
    for short in (0, 1):
        memory = GuardedMemory(2 * size, at_end=True)
        decode(dtype, memory.address + size + short, values, size)
        print(RIGHT_SIZE, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["short"]:
        overrun(sys.argv[2])
    else:
        for name in TYPES:
            print(name, flush=True)
            for end in (True, False):
                run_guarded(name, at_end=end)
        print("all right")
