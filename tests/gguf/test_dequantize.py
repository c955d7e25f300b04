"""NumPy's values of GGUF's quantised types are those of gguf's Python package."""

import re

import numpy as np
import pytest

from penstock.gguf.dequantize import LAYOUTS, PIECE, dequantize
from penstock.gguf.types import TYPES as KINDS
from tests.gguf.blocks import TYPES, bits, random_rows, real_rows, reference, sizes


def test_every_quantised_type_that_the_parser_knows_is_read() -> None:
    assert set(LAYOUTS) == {name for name, kind in KINDS.items() if kind.quantized} == set(TYPES)
    for name, layout in LAYOUTS.items():
        assert sizes(name) == (KINDS[name].block_values, layout.itemsize)


@pytest.mark.parametrize("dtype", TYPES)
def test_values_have_the_bits_of_gguf(dtype: str) -> None:
    rows, k = 2 * PIECE // 1024 + 7, 768  # more than one piece
    data = random_rows(dtype, rows, k)
    want = reference(dtype, data)
    assert np.isfinite(want).all() and want.shape == (rows, k)
    got = dequantize(dtype, data, rows, k)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.filterwarnings("error")
def test_scales_that_are_infinite_or_nan_give_such_values(dtype: str) -> None:
    data = random_rows(dtype, 3000, 256, finite=False)
    want = reference(dtype, data)
    assert not np.isfinite(want).all()
    np.testing.assert_array_equal(dequantize(dtype, data, 3000, 256), want)


def test_the_tensors_of_a_real_file_have_the_bits_of_gguf() -> None:
    seen = set()
    for dtype, data in real_rows():
        want = reference(dtype, data)
        np.testing.assert_array_equal(bits(dequantize(dtype, data, *want.shape)), bits(want))
        seen.add(dtype)
    assert seen == {"Q4_1", "Q8_0"}


def test_no_rows_give_no_values() -> None:
    assert dequantize("Q4_K", np.empty((0, 144), np.uint8), 0, 256).shape == (0, 256)


@pytest.mark.parametrize(
    ("dtype", "size", "rows", "k", "message"),
    [
        ("F32", 4, 1, 1, "type F32: only Q4_0, Q4_1"),
        ("Q9_K", 4, 1, 1, "type Q9_K: only"),
        ("Q4_K", 144, 1, 128, "1 rows of 128 values: Q4_K has blocks of 256 values"),
        ("Q4_0", 18, -1, 32, "-1 rows of 32 values"),
        ("Q4_0", 18, -1, -32, "-1 rows of -32 values"),
        ("Q4_0", 35, 1, 64, "35 items of uint8 for 1 rows of 64 values: 36 bytes are needed"),
        ("Q4_0", 36, 1, 32, "36 items of uint8 for 1 rows of 32 values: 18 bytes are needed"),
    ],
)
def test_bytes_of_another_size_are_refused(dtype: str, size: int, rows: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dequantize(dtype, np.zeros(size, np.uint8), rows, k)
