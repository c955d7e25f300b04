"""Native values and codes of GGUF's quantised types are those of gguf's Python package, without loss."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.config.weights import GGUF_FORMATS
from penstock.kernels.native.gguf_rows import dequantize
from penstock.kernels.native.loader import instruction_sets
from tests.gguf.blocks import TYPES, bits, random_rows, real_rows, reference, sizes
from tests.kernels.native.conftest import ROOT
from tests.kernels.native.packing.coded_rows import RIGHT_SIZE, CodeTraits, decode, functions, traits_of
from tests.kernels.native.test_sanitized import environment

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")
ROWS = 64
CODE_BITS = {"Q2_K": 2, "Q3_K": 3, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}  # others: 4
SUB_BITS = {"Q2_K": 4, "Q6_K": 8}  # of a group's scale, where there are two levels; others: 6


def values_of(traits: CodeTraits, parts: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    """The values of a decoded row by the formula of CodeTraits, in fp32."""

    def per_value(name: str) -> NDArray[np.float32]:
        if not traits.two_levels:
            return np.repeat(parts[name], traits.group)
        per_group = np.repeat(parts[f"super_{name}"].astype(np.float32), 256 // traits.group)
        return np.repeat(per_group * parts[f"sub_{name}"].astype(np.float32), traits.group)

    if traits.table:
        table = np.frombuffer(ctypes.string_at(traits.table, 16), np.int8)
        whole = table[parts["codes"]].astype(np.float32)
    else:
        whole = (parts["codes"].astype(np.int32) - traits.zero).astype(np.float32)
    values = per_value("scales") * whole
    return values + per_value("mins") if traits.mins else values


def decoded(dtype: str, data: NDArray[np.uint8], k: int) -> list[dict[str, NDArray[Any]]]:
    return [decode(dtype, row.ctypes.data, k, row.nbytes) for row in data]


@pytest.mark.parametrize("dtype", TYPES)
def test_values_have_the_bits_of_gguf(dtype: str) -> None:
    data = random_rows(dtype, ROWS, 1536)
    want = reference(dtype, data)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(bits(dequantize(dtype, data, ROWS, 1536)), bits(want))
    shifted = np.concatenate((np.zeros(1, np.uint8), data.reshape(-1)))[1:]  # at another alignment
    np.testing.assert_array_equal(bits(dequantize(dtype, shifted, ROWS, 1536)), bits(want))


@pytest.mark.parametrize("dtype", TYPES)
def test_codes_and_scales_have_the_values_of_gguf(dtype: str) -> None:
    traits, data = traits_of(dtype), random_rows(dtype, ROWS, 1536)
    rows = decoded(dtype, data, 1536)
    got = np.stack([values_of(traits, parts) for parts in rows])
    np.testing.assert_array_equal(bits(got), bits(reference(dtype, data)))
    seen = np.unique(np.concatenate([parts["codes"] for parts in rows]))
    assert seen.tolist() == list(range(1 << traits.bits))


@pytest.mark.parametrize("dtype", TYPES)
def test_codes_and_scales_fill_a_block_of_the_format(dtype: str) -> None:
    traits = traits_of(dtype)
    assert (traits.block_values, traits.block_bytes) == sizes(dtype)
    assert traits.bits == CODE_BITS.get(dtype, 4)
    assert traits.two_levels == (traits.block_values == 256)
    assert traits.group == (16 if dtype in ("Q2_K", "Q3_K", "Q6_K") else 32)
    per_group = SUB_BITS.get(dtype, 6) * traits.block_values // traits.group if traits.two_levels else 0
    beside = ((8 if dtype == "MXFP4" else 16) + per_group) * (2 if traits.mins else 1)
    assert traits.block_bytes * 8 == traits.block_values * traits.bits + beside


@pytest.mark.parametrize("dtype", TYPES)
def test_scales_that_are_infinite_or_nan_give_such_values(dtype: str) -> None:
    data = random_rows(dtype, 3000, 256, finite=False)
    want = reference(dtype, data)
    assert not np.isfinite(want).all()
    np.testing.assert_array_equal(dequantize(dtype, data, 3000, 256), want)
    traits = traits_of(dtype)
    with np.errstate(all="ignore"):
        got = np.stack([values_of(traits, parts) for parts in decoded(dtype, data[:200], 256)])
    np.testing.assert_array_equal(got, want[:200])


def test_the_tensors_of_a_real_file_have_the_bits_of_gguf() -> None:
    seen = set()
    for dtype, data in real_rows():
        want = reference(dtype, data)
        np.testing.assert_array_equal(bits(dequantize(dtype, data, *want.shape)), bits(want))
        got = np.stack([values_of(traits_of(dtype), parts) for parts in decoded(dtype, data, want.shape[1])])
        np.testing.assert_array_equal(bits(got), bits(want))
        seen.add(dtype)
    assert seen == {"Q4_1", "Q8_0"}


def test_native_code_has_codes_for_the_types_of_gguf_only() -> None:
    assert set(GGUF_FORMATS) == set(TYPES)
    numbers = [number for number in range(-300, 300) if functions().penstock_code_traits(number)]
    assert numbers == list(range(3, 3 + len(TYPES)))


@pytest.mark.parametrize(
    ("number", "rows", "k", "row_bytes"),
    [
        (-1, 1, 256, 1024),
        (0, 1, 256, 1024),
        (2, 1, 256, 1024),
        (16, 1, 256, 1024),
        (1 << 30, 1, 256, 1024),
        (3, 1, 33, 1024),
        (3, 1, -32, 1024),
        (3, -1, 32, 18),
        (3, 1, 32, 17),
        (3, 1, 64, 35),
        (3, 1, 32, -18),
        (10, 1, 128, 144),
        (10, 1, 256, 143),
        (7, 1, (1 << 63) - 32, (1 << 63) - 1),
    ],
)
def test_native_code_refuses_rows_that_are_not_whole_and_writes_nothing(
    number: int, rows: int, k: int, row_bytes: int
) -> None:
    data, out = np.zeros(1024, np.uint8), np.full(1024, 7, np.float32)
    assert functions().penstock_dequantize(number, data.ctypes.data, rows, k, row_bytes, out.ctypes.data) == -1
    assert rows < 0 or functions().penstock_decode(number, data.ctypes.data, k, row_bytes, None) == -1
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("dtype", "size", "rows", "k", "message"),
    [
        ("F32", 4, 1, 1, "type F32: native code reads Q4_0, Q4_1"),
        ("Q4_K", 144, 1, 128, "a row of 144 bytes is not 128 values of Q4_K"),
        ("Q4_0", 35, 1, 64, "a row of 35 bytes is not 64 values of Q4_0"),
        ("Q4_0", 35, 2, 32, "2 rows in uint8 [35]"),
        ("Q4_0", 18, -1, 32, "-1 rows in uint8 [18]"),
        ("Q4_0", 18, 1, -32, "a row of 18 bytes is not -32 values of Q4_0"),
    ],
)
def test_bytes_of_another_size_are_refused(dtype: str, size: int, rows: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dequantize(dtype, np.zeros(size, np.uint8), rows, k)


def run_guarded(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.kernels.native.packing.coded_rows", *arguments]
    return subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )


def test_no_byte_outside_a_row_or_its_parts_is_touched() -> None:
    done = run_guarded()
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-3000:]}"
    assert done.stdout.splitlines() == [*TYPES, "all right"]


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_K"])
def test_a_read_past_a_row_ends_the_process(dtype: str) -> None:
    """The control of the test above."""
    done = run_guarded("short", dtype)
    assert done.returncode == -signal.SIGSEGV, done.stderr[-3000:]
    assert done.stdout == f"{RIGHT_SIZE}\n"


@pytest.mark.long
@pytest.mark.rare  # a build takes half a minute
def test_decoding_is_free_of_undefined_behaviour(sanitized: Path) -> None:
    done = run_guarded(**environment(sanitized))
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-6000:]}"
    assert done.stdout.endswith("all right\n")
