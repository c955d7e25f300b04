"""Rows of GGUF's types are packed without loss: embedding rows are the values of gguf's Python package."""

import itertools
import random

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.config.weights import (
    BF16,
    F32,
    GGUF_FORMATS,
    INT8,
    INT16,
    WeightFormat,
    format_of,
    held_as,
    int4_format,
)
from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.memory import WeightMemory
from penstock.kernels.native.pack import pack
from penstock.kernels.native.packer import NativePacker, NativePacking
from penstock.kernels.native.packing import PackedWeight, SectionedWeight
from penstock.kernels.native.session import Session, native_session
from penstock.kernels.native.team import ThreadTeam
from tests.gguf.blocks import HALVES, TYPES, bits, random_rows, real_rows, reference, sizes
from tests.kernels.native.reference import GROUPED, JOINED, TABLES, product, rows_of, same_bits, unpacked

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")
WIDTHS = (256, 768)  # along k; of a row
# Exponents of MXFP4 for which 2^(exponent - 128) is an fp16 number.
LEAST_EXPONENT, MOST_EXPONENT = 104, 143


def blocks_of(stored: str, rows: int, k: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of random blocks, whose scales are all finite and, of MXFP4, fp16 numbers."""
    data = random_rows(stored, rows, k, seed=seed)
    if stored == "MXFP4":
        exponents = np.random.default_rng(seed).integers(LEAST_EXPONENT, MOST_EXPONENT + 1, data.size // 17)
        exponents[:2] = LEAST_EXPONENT, MOST_EXPONENT
        data.reshape(-1, 17)[:, 0] = exponents
    return data


def quantized_blocks(stored: str, values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows of small values as blocks: gguf's, or random ones where gguf only reads the type."""
    try:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[stored])
    except NotImplementedError:
        data = blocks_of(stored, *values.shape)
        blocks = data.reshape(-1, sizes(stored)[1])
        for place in HALVES.get(stored, (0,)):
            blocks[:, place : place + 2] = np.array([0x1400], "<u2").view(np.uint8)
        return data


def packed(
    stored: tuple[str, ...],
    data: list[NDArray[np.uint8]],
    k: int,
    fmt: WeightFormat,
    *,
    gated: bool = False,
    experts: int = 1,
) -> PackedWeight:
    """Rows of several types below each other, packed in pieces that are cut anywhere and come in any order."""
    total, source = sum(map(len, data)), random.Random(k)
    packer = NativePacker((total, k), fmt, gated=gated, memory=WeightMemory(), experts=experts)
    pieces, first = [], 0
    for name, rows in zip(stored, data, strict=True):
        cuts = sorted({0, len(rows), *(source.randrange(len(rows) + 1) for _ in range(3))})
        pieces += [(first + a, rows[a:b], name) for a, b in itertools.pairwise(cuts)]
        first += len(rows)
    for start, rows, name in source.sample(pieces, len(pieces)):
        packer.put_stored(start, torch.from_numpy(rows.copy()), name)
    return packer.finish()


def values_of(weight: PackedWeight, isa: str = "") -> NDArray[np.float32]:
    """The weight's rows as an embedding gives them."""
    linear = NativeLinear(Session(ThreadTeam(isa, 1)) if isa else native_session())
    rows = torch.from_numpy(rows_of(weight))
    # The op reads one matrix: those of experts lie one behind the other, as blocks of one.
    blocks = PackedWeight(*weight.parts.values(), None, int(rows.max()) + 1, weight.k, weight.format)  # type: ignore[arg-type]
    return linear.rows(rows, blocks, 1.0, torch.float32).numpy()


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("stored", TYPES)
def test_rows_have_the_bits_of_gguf(stored: str, isa: str) -> None:
    for n, k in ((53, 256), (16, 768), (1, 1280)):
        data = blocks_of(stored, n, k)
        weight, want = packed((stored,), [data], k, GGUF_FORMATS[stored]), reference(stored, data)
        np.testing.assert_array_equal(bits(values_of(weight, isa)), bits(want))
        np.testing.assert_array_equal(bits(unpacked(weight).values()[:, :k]), bits(want))


@pytest.mark.parametrize("stored", [name for name in TYPES if not GGUF_FORMATS[name].supers(256)])
def test_rows_that_end_within_256_values_have_the_bits_of_gguf(stored: str) -> None:
    for k in (32, 96, 576, 2080):
        data = blocks_of(stored, 21, k)
        weight = packed((stored,), [data], k, GGUF_FORMATS[stored])
        np.testing.assert_array_equal(bits(values_of(weight)), bits(reference(stored, data)))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stored", JOINED, ids="+".join)
def test_types_in_one_matrix_have_the_values_of_gguf(stored: tuple[str, ...], gated: bool) -> None:
    """Minima of 0 that a type does not have make minus zero zero."""
    for order in itertools.permutations(stored):
        for k in WIDTHS:
            sizes = [24] * len(order) if gated else [19, 8, 26][: len(order)]
            data = [blocks_of(name, n, k, seed=i) for i, (name, n) in enumerate(zip(order, sizes, strict=True))]
            weight = packed(order, data, k, format_of(GGUF_FORMATS[name] for name in order), gated=gated)
            want = np.concatenate([reference(name, rows) for name, rows in zip(order, data, strict=True)])
            np.testing.assert_array_equal(values_of(weight), want)
            np.testing.assert_array_equal(unpacked(weight).values()[:, :k], want)


@pytest.mark.parametrize("stored", [*((name,) for name in TYPES), *JOINED], ids="+".join)
def test_scales_by_column_are_rounded_to_fp16(stored: tuple[str, ...]) -> None:
    """Codes stay as they are. A column's power of two is of its largest scale, so the smallest may become denormals."""
    sizes, k = [19, 8, 26][: len(stored)], 768
    data = [blocks_of(name, n, k, seed=i) for i, (name, n) in enumerate(zip(stored, sizes, strict=True))]
    fmt = format_of(GGUF_FORMATS[name] for name in stored)
    weight, whole = (packed(stored, data, k, each) for each in (held_as(fmt, "amx"), fmt))
    assert torch.equal(weight.lines, whole.lines)
    got, want = unpacked(weight), unpacked(whole)
    powers = got.powers.astype(np.float64)[:, None]
    assert (np.frexp(powers)[0] == 0.5).all()
    pairs = [(got.scales, want.scales)] if got.mins is None else [(got.scales, want.scales), (got.mins, want.mins)]
    for ours, theirs in pairs:
        assert theirs is not None
        error = np.abs(ours * powers - theirs)
        assert (error <= np.maximum(2.0**-11 * np.abs(theirs), 2.0**-25 * powers)).all()
    codes = TABLES.get(fmt.codes, np.arange(2**fmt.bits) - fmt.zero)
    ends = [got.scales * end + (0.0 if got.mins is None else got.mins) for end in (min(codes), max(codes))]
    largest = np.abs(ends).max((0, 2))
    assert (largest > 0.999 * 2**13).all() and (largest < 1.001 * 2**14).all()
    for isa in instruction_sets():
        np.testing.assert_array_equal(bits(values_of(weight, isa)), bits(got.values()[:, :k]))


def test_a_row_of_zeros_has_a_power_of_one() -> None:
    for fmt in (INT8, int4_format(32)):
        weight = pack(torch.zeros(16, 64), None, held_as(fmt, "amx"))
        assert (unpacked(weight).powers == 1.0).all()
        assert not values_of(weight).any()


@pytest.mark.parametrize("stored", JOINED, ids="+".join)
def test_sections_are_packed_each_as_alone(stored: tuple[str, ...]) -> None:
    sizes, k = [19, 8, 26][: len(stored)], 512
    data = [blocks_of(name, n, k, seed=i) for i, (name, n) in enumerate(zip(stored, sizes, strict=True))]
    sections = [(n, (GGUF_FORMATS[name],)) for name, n in zip(stored, sizes, strict=True)]
    packer = NativePacking("bfloat16", "none", 32, "avx2")((sum(sizes), k), "matrix", sections=sections)
    for i in reversed(range(len(stored))):
        start = sum(sizes[:i])
        packer.put_stored(start + 3, torch.from_numpy(data[i][3:].copy()), stored[i])
        packer.put_stored(start, torch.from_numpy(data[i][:3].copy()), stored[i])
    weight = packer.finish()
    assert isinstance(weight, SectionedWeight)
    assert weight.n == sum(sizes)
    for section, name, rows in zip(weight.sections, stored, data, strict=True):
        alone = packed((name,), [rows], k, GGUF_FORMATS[name])
        assert section.format == alone.format
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(section.tensors, alone.tensors, strict=True))
    rows = torch.from_numpy(data[0])
    for start in (-1, sum(sizes)):
        with pytest.raises(ValueError, match="does not belong to a weight"):
            packer.put_stored(start, rows, stored[0])
    with pytest.raises(ValueError, match="do not belong to a weight"):  # they go on in the next section
        packer.put_stored(1, rows, stored[0])


def test_any_two_types_join_without_loss() -> None:
    for stored in itertools.combinations(TYPES, 2):
        data = [blocks_of(name, 3, 512) for name in stored]
        weight = packed(stored, data, 512, format_of(GGUF_FORMATS[name] for name in stored))
        want = np.concatenate([reference(name, rows) for name, rows in zip(stored, data, strict=True)])
        np.testing.assert_array_equal(values_of(weight), want, err_msg="+".join(stored))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("stored", [("Q4_K",), ("MXFP4",), ("Q4_K", "Q6_K"), ("Q5_0", "Q8_0")], ids="+".join)
def test_experts_have_the_values_of_gguf(stored: tuple[str, ...], gated: bool) -> None:
    experts, n, k = 4, 2 * 9, 512
    of_each = experts // len(stored) * n  # types may differ from expert to expert
    data = [blocks_of(name, of_each, k, seed=i) for i, name in enumerate(stored)]
    weight = packed(stored, data, k, format_of(GGUF_FORMATS[name] for name in stored), gated=gated, experts=experts)
    want = np.concatenate([reference(name, rows) for name, rows in zip(stored, data, strict=True)])
    assert weight.count == experts
    np.testing.assert_array_equal(values_of(weight), want)


@pytest.mark.parametrize("stored", TYPES)
def test_products_are_those_of_the_packed_codes(stored: str) -> None:
    """Blocks whose values are of ordinary size, as they are in a model."""
    data = blocks_of(stored, 53, 512)
    weight = packed((stored,), [data], 512, GROUPED[stored])
    for name in ("super_scales", "super_mins") if weight.super_scales is not None else ("scales", "mins"):
        if (part := weight.parts[name]) is not None:
            part.clamp_(-1.0, 1.0)
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(1))
    for rows in (1, 9):
        assert same_bits(NativeLinear(native_session()).logits(x[:rows], weight), product(x[:rows].numpy(), weight))


def test_the_tensors_of_a_real_file_have_the_bits_of_gguf() -> None:
    for stored, data in real_rows()[::20]:
        want = reference(stored, data)
        weight = packed((stored,), [data], want.shape[1], GGUF_FORMATS[stored])
        np.testing.assert_array_equal(bits(values_of(weight)), bits(want))


@pytest.mark.parametrize("fmt", [F32, BF16, INT16], ids=lambda fmt: fmt.scheme)
@pytest.mark.parametrize("stored", TYPES)
def test_rows_become_floats_where_a_weight_is_not_grouped(stored: str, fmt: WeightFormat) -> None:
    """For routers, and where tensors of floats are in the same matrix."""
    data = blocks_of(stored, 53, 512)
    weight = packed((stored,), [data], 512, fmt)
    want = pack(torch.from_numpy(reference(stored, data)), None, fmt)
    for ours, theirs in zip(weight.tensors, want.tensors, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("half", [0x7C00, 0xFC00, 0x7E01], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize("stored", [name for name in TYPES if name != "MXFP4"])
def test_rows_with_a_scale_that_is_not_finite_are_refused(stored: str, half: int) -> None:
    size = sizes(stored)[1]
    for place in HALVES.get(stored, (0,)):
        data = blocks_of(stored, 20, 512)
        for row in (3, 17):
            data[row, -size + place : data.shape[1] - size + place + 2] = np.array([half], "<u2").view(np.uint8)
        wider = format_of(GGUF_FORMATS[name] for name in (stored, "Q4_1", "Q6_K"))
        for fmt in (GGUF_FORMATS[stored], wider, held_as(GGUF_FORMATS[stored], "amx")):
            with pytest.raises(ValueError, match=r"^2 rows hold infinity or NaN"):
                packed_at_once(stored, data, 512, fmt)


def packed_at_once(stored: str, data: NDArray[np.uint8], k: int, fmt: WeightFormat) -> PackedWeight:
    packer = NativePacker((len(data), k), fmt, gated=False, memory=WeightMemory())
    packer.put_stored(0, torch.from_numpy(data), stored)
    return packer.finish()


@pytest.mark.parametrize("exponent", [0, 1, LEAST_EXPONENT - 1, MOST_EXPONENT + 1, 254, 255])
def test_an_exponent_that_fp16_cannot_hold_is_refused(exponent: int) -> None:
    data = blocks_of("MXFP4", 20, 512)
    data[5, 17] = data[11, 0] = data[11, 34] = exponent
    with pytest.raises(ValueError, match=r"^2 rows hold"):
        packed_at_once("MXFP4", data, 512, GGUF_FORMATS["MXFP4"])


@pytest.mark.parametrize("exponent", [MOST_EXPONENT + 1, 186, 188, 189, 255])
def test_scales_by_column_hold_values_below_2_to_the_64th(exponent: int) -> None:
    """So that products do not overflow. The largest of MXFP4 is 12 * 2^(exponent - 128); 255 is NaN."""
    data = blocks_of("MXFP4", 20, 512)
    data[5, 17] = data[11, 0] = data[11, 34] = exponent
    fmt = held_as(GGUF_FORMATS["MXFP4"], "amx")
    if exponent > 188:
        with pytest.raises(ValueError, match=r"^2 rows hold"):
            packed_at_once("MXFP4", data, 512, fmt)
    else:
        weight = packed_at_once("MXFP4", data, 512, fmt)
        np.testing.assert_array_equal(values_of(weight)[5, 32:64], reference("MXFP4", data)[5, 32:64])


@pytest.mark.parametrize("start", [39, -1])
def test_rows_outside_a_weight_are_refused(start: int) -> None:
    packer = NativePacker((40, 512), GGUF_FORMATS["Q4_K"], gated=False, memory=WeightMemory())
    with pytest.raises(ValueError, match="do not belong to a weight"):
        packer.put_stored(start, torch.zeros((2, 288), dtype=torch.uint8), "Q4_K")


@pytest.mark.parametrize(("stored", "k", "size"), [("Q4_K", 512, 287), ("Q4_K", 512, 0), ("Q4_0", 40, 36)])
def test_rows_that_are_too_short_are_refused(stored: str, k: int, size: int) -> None:
    packer = NativePacker((40, k), GGUF_FORMATS[stored], gated=False, memory=WeightMemory())
    with pytest.raises(ValueError, match=f"a row of {size} bytes is not {k} values"):
        packer.put_stored(0, torch.zeros((2, size), dtype=torch.uint8), stored)


@pytest.mark.parametrize("fmt", [INT8, *map(int4_format, (32, 64, 128))], ids=str)
@pytest.mark.parametrize("stored", TYPES)
def test_formats_by_column_hold_any_scales(stored: str, fmt: WeightFormat) -> None:
    """Only codes that do not fit in the format are quantised again."""
    source, fmt = GGUF_FORMATS[stored], held_as(fmt, "amx")
    data = quantized_blocks(stored, np.random.default_rng(1).standard_normal((21, 768)).astype(np.float32))
    weight, dense = packed((stored,), [data], 768, fmt), reference(stored, data)
    same_codes = fmt.codes == "bytes" or (fmt.codes, fmt.zero) == (source.codes, source.zero)
    if same_codes and source.group % fmt.group == 0 and (fmt.mins or not source.mins):
        exact = packed((stored,), [data], 768, held_as(source, "amx"))
        np.testing.assert_array_equal(values_of(weight), values_of(exact))
    else:
        want = pack(torch.from_numpy(dense), None, fmt)
        for ours, theirs in zip(weight.tensors, want.tensors, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("fmt", [INT8, *map(int4_format, (32, 64, 128))], ids=str)
@pytest.mark.parametrize("stored", TYPES)
def test_rows_that_a_format_cannot_hold_are_quantised_again(stored: str, fmt: WeightFormat) -> None:
    """With --quantization, where tensors of floats are in the same matrix: what the format holds has no loss."""
    source = GGUF_FORMATS[stored]
    real = torch.randn(21, 768, generator=torch.Generator().manual_seed(1)).numpy()
    data = quantized_blocks(stored, real)
    weight, dense = packed((stored,), [data], 768, fmt), reference(stored, data)
    one_level = (source.scales, source.mins, source.group) == ("f16", False, 32)
    if source == fmt or (one_level and fmt == INT8):
        np.testing.assert_array_equal(values_of(weight), dense)
    else:
        want = pack(torch.from_numpy(dense), None, fmt)
        for ours, theirs in zip(weight.tensors, want.tensors, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
