"""Codes in a file are the values that were chosen, by readers that are not ours where there are any."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock.gguf import TYPES, read_gguf
from penstock.gguf.dequantize import dequantize
from penstock.quantize.formats.blocks import Blocks
from penstock.quantize.formats.gguf_mix import file_metadata
from penstock.quantize.formats.grid import Quantized, joined_grids
from penstock.quantize.formats.integers import Float8, Integers
from penstock.quantize.formats.packing import packed_words
from penstock.quantize.formats.target import CannotQuantizeTo, CompressedTensors, GptqCheckpoint
from penstock.quantize.formats.tensor_file import OutputTensor, TensorFile, gguf_layout, safetensors_layout
from penstock.quantize.rounding import rounded

BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
INTEGERS = [Integers(bits, group, zeros, torch.bfloat16) for bits in (3, 4, 8) for group in (0, 32) for zeros in (0, 1)]


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Random weights with a few that are far larger, a row and a group of zeros, and a row of one sign."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator) * 0.05
    matrix[torch.rand(rows, columns, generator=generator) > 0.99] *= 8
    matrix[1] = 0
    matrix[2, :256] = 0
    matrix[3] = matrix[3].abs()
    return matrix


def importances() -> torch.Tensor:
    return torch.rand(512, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_a_gguf_file_have_the_values(name: str, search: bool) -> None:
    matrix = weights(7, 512)
    weight = rounded(matrix, Blocks(name), importances(), search=search)
    data = Blocks(name).encode(weight)
    assert data.shape == (7, TYPES[name].row_bytes(512))
    ours = dequantize(name, data.reshape(-1), 7, 512)
    theirs = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(ours, weight.values.numpy())
    np.testing.assert_array_equal(theirs, weight.values.numpy())
    assert not weight.values[1].any()
    step = matrix.abs().amax(1, keepdim=True) / (1 << int(name[1]) - 1)  # of codes with a sign
    assert search or ((weight.values - matrix).abs() <= 1.1 * step).all()


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "Q8_0"])
def test_a_search_lessens_the_error_that_it_weighs(name: str) -> None:
    matrix, importance = weights(40, 512, 1), importances() ** 4 + 1e-3

    def error(search: bool) -> float:
        return float(
            ((rounded(matrix, Blocks(name), importance, search=search).values - matrix) ** 2 * importance).sum()
        )

    assert error(True) < error(False)


@pytest.mark.parametrize("fmt", INTEGERS, ids=str)
def test_integers_lie_within_their_bits_and_near_the_weights(fmt: Integers) -> None:
    matrix = weights(24, 128, 2)
    plain, best = (rounded(matrix, fmt, None, search=search) for search in (False, True))
    for weight in (plain, best):
        assert weight.codes.min() >= weight.grid.low and weight.codes.max() <= weight.grid.high
        assert weight.grid.high - weight.grid.low == (1 << fmt.bits) - 1
        assert torch.equal(weight.grid.scale, weight.grid.scale.to(torch.bfloat16).float())
        assert not weight.values[1].any()
    errors = [((weight.values - matrix) ** 2).sum() for weight in (plain, best)]
    assert errors[1] <= errors[0] * (1.25 if fmt.bits == 8 else 1)  # scales are rounded to bf16


def test_fp8_is_that_of_torch() -> None:
    matrix = weights(8, 64, 3)
    weight = rounded(matrix, Float8(torch.bfloat16), None, search=False)
    scale = weight.grid.scale
    expected = (matrix / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(weight.values, expected)


@pytest.mark.parametrize(("bits", "count"), [(4, 24), (4, 21), (8, 10), (3, 64), (2, 17), (3, 11)])
def test_words_hold_a_stream_of_bits(bits: int, count: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (5, count)).astype(np.uint8)
    words = packed_words(codes, bits)
    for row, packed in zip(codes, words, strict=True):
        stream = sum(int(word) << 32 * i for i, word in enumerate(packed.view(np.uint32)))
        assert [stream >> bits * i & (1 << bits) - 1 for i in range(count)] == row.tolist()
        assert stream >> bits * count == 0


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_unpack_to_the_values(bits: int, zeros: bool) -> None:
    target = CompressedTensors(Integers(bits, 32, zeros, torch.bfloat16))
    weight = rounded(weights(24, 96, 4), target.fmt, None, search=True)
    found = target.encode("a.weight", weight)
    entries = target.entries("a.weight", (24, 96))
    assert {name: data.nbytes for name, data in found.items()} == {name: e.size for name, e in entries.items()}
    per_word, shifts = 32 // bits, np.arange(0, 32, bits, dtype=np.uint32)
    packed = found["a.weight_packed"].view(np.uint32)
    codes = (packed[:, :, None] >> shifts & (1 << bits) - 1).reshape(24, -1)[:, :96].astype(np.float32)
    scale = torch.from_numpy(found["a.weight_scale"]).view(torch.bfloat16).float().numpy().repeat(32, 1)
    zero: np.ndarray | float = float(1 << bits - 1)
    if zeros:
        words = found["a.weight_zero_point"].view(np.uint32)  # [rows / per_word, groups]
        each = (words[:, None, :] >> shifts[None, :, None] & (1 << bits) - 1).reshape(-1, 3)[:24]
        zero = each.astype(np.float32).repeat(32, 1)
    assert per_word * packed.shape[1] == 96 and found["a.weight_shape"].tolist() == [24, 96]
    np.testing.assert_array_equal((codes - zero) * scale, weight.values.numpy())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_checkpoints_unpack_to_the_values(bits: int, zeros: bool) -> None:
    target = GptqCheckpoint(Integers(bits, 32, zeros, torch.float16))
    weight = rounded(weights(32, 96, 5), target.fmt, None, search=True)
    found = target.encode("a.weight", weight)
    entries = target.entries("a.weight", (32, 96))
    assert {name: (data.shape, data.nbytes) for name, data in found.items()} == {
        name: (entry.shape, entry.size) for name, entry in entries.items()
    }

    def unpacked(words: np.ndarray, count: int) -> np.ndarray:
        bits_of = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
        each = bits_of[:, : count * bits].reshape(len(words), count, bits)
        return (each << np.arange(bits)).sum(-1).astype(np.float32)

    codes = unpacked(found["a.qweight"].T, 96).T  # [columns, rows]
    zero = (unpacked(found["a.qzeros"], 32) + 1) % (1 << bits)  # version 1 stores one less
    scales = found["a.scales"].view(np.float16).astype(np.float32)
    groups = found["a.g_idx"]
    np.testing.assert_array_equal(((codes - zero[groups]) * scales[groups]).T, weight.values.numpy())


def test_a_format_says_which_matrix_it_cannot_hold() -> None:
    with pytest.raises(
        CannotQuantizeTo, match=r"--group 128 does not divide the 576 columns of a\.weight: use --group 192"
    ):
        CompressedTensors(Integers(4, 128, False, torch.bfloat16)).check("a.weight", (64, 576))
    with pytest.raises(CannotQuantizeTo, match="37 rows and 64 columns"):
        GptqCheckpoint(Integers(4, 32, False, torch.float16)).check("a.weight", (37, 64))


def test_grids_of_parts_join() -> None:
    matrix, fmt = weights(9, 256, 6), Blocks("Q4_K")
    whole = rounded(matrix, fmt, None, search=True)
    parts = [rounded(matrix[:4], fmt, None, search=True), rounded(matrix[4:], fmt, None, search=True)]
    joined = Quantized(torch.cat([part.codes for part in parts]), joined_grids([part.grid for part in parts], 0))
    np.testing.assert_array_equal(fmt.encode(joined), fmt.encode(whole))
    order = torch.tensor([3, 1, 8, 0, 2, 4, 7, 6, 5])
    np.testing.assert_array_equal(fmt.encode(whole.rows(order)), fmt.encode(whole)[order.numpy()])


def test_files_hold_what_was_put_in_any_order(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    entries = {
        "a": OutputTensor("F32", (2, 3), 24),
        "b": OutputTensor("I32", (5,), 20),
        "c": OutputTensor("F16", (), 2),
    }
    file = TensorFile(tmp_path / "x.safetensors", entries, safetensors_layout(entries))
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.int32)
    file.put("c", np.array(1.5, np.float16))
    file.put("b", b)
    file.put("a", a[1:], 12)
    file.put("a", a[:1])
    with pytest.raises(ValueError, match="a: 28 bytes were made"):
        file.put("a", np.zeros(7, np.float32))
    file.close()
    found = load_file(tmp_path / "x.safetensors")
    assert found["c"] == 1.5
    np.testing.assert_array_equal(found["a"], a)
    np.testing.assert_array_equal(found["b"], b)


def test_metadata_of_a_gguf_file_is_copied(tmp_path: Path) -> None:
    source, made = tmp_path / "a.gguf", tmp_path / "b.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_string("some.text", "größer")
    writer.add_array("some.texts", ["a", "", "ccc"])
    writer.add_array("some.numbers", [1.5, -2.0])
    writer.add_bool("some.flag", True)
    writer.add_uint16("split.count", 1)
    writer.add_tensor("t", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    entries = {"t": OutputTensor("Q8_0", (2, 32), 68), "u": OutputTensor("F32", (3,), 12)}
    TensorFile(made, entries, gguf_layout(file_metadata(source, "Q4_K_M"), entries)).close()
    before, after = read_gguf(source), read_gguf(made)
    assert after.file_type == "Q4_K_M"
    dropped = {"general.file_type", "general.quantization_version", "split.count"}
    assert {k: v for k, v in after.metadata.items() if k not in dropped} == {
        k: v for k, v in before.metadata.items() if k not in dropped
    }
    assert {name: (t.type.name, t.shape) for name, t in after.tensors.items()} == {
        "t": ("Q8_0", (2, 32)),
        "u": ("F32", (3,)),
    }
    assert struct.unpack("<I", made.read_bytes()[4:8]) == (3,)
    gguf.GGUFReader(made)
