"""Headers of safetensors files: those the official library writes, and every way to be wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.families.checkpoint.safetensors_file import read_header
from penstock.families.checkpoint.stored import CheckpointError
from tests.weights.files import entry, raw

GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}


def write(folder: Path, content: bytes) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def test_what_the_official_library_writes(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {
        "matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
        "empty": np.zeros((0, 5), np.float16),
        "scalar": np.array(7, np.int64),
        "é": np.ones(3, np.float16),
    }
    path = tmp_path / "model.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    tensors = read_header(path)
    content = path.read_bytes()
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        stored = tensors[name]
        assert stored.shape == array.shape
        assert content[stored.offset : stored.offset + stored.size] == array.tobytes()


def test_a_file_of_no_tensors(tmp_path: Path) -> None:
    assert read_header(write(tmp_path, raw({"__metadata__": {"format": "pt"}}))) == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; download it again"),
        (b"abc", "truncated"),
        (raw(GOOD)[:20], "truncated"),
        (raw(GOOD, bytes(32), length=10**18), "truncated"),
        (raw(GOOD, bytes(32), length=2**64 - 1), "truncated"),
        (raw(b"\xff\xfe{}", bytes(32)), "not valid JSON"),
        (raw(b"garbage"), "not valid JSON"),
        (raw(b"[]"), "a JSON object is expected"),
        (raw(b'{"a":' * 200_000 + b"1" + b"}" * 200_000), "deeper than 32"),
        (raw(b'{"a": {}, "a": {}}'), "'a' appears twice"),
        (raw({"a": 1}), "'a' is not described by an object"),
        (raw({"a": {"dtype": "F32"}}), "'a' has no valid shape"),
        (raw({"a": entry("Q4", [8], 0, 4)}, bytes(4)), "'a' has the unknown dtype 'Q4'"),
        (raw({"a": entry(["F32"], [1], 0, 4)}, bytes(4)), "unknown dtype"),  # type: ignore[arg-type]
        (raw({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "no valid shape: [-1]"),
        (raw({"a": entry("F32", [1.0], 0, 4)}, bytes(4)), "no valid shape"),  # type: ignore[list-item]
        (raw({"a": entry("F32", [True], 0, 4)}, bytes(4)), "no valid shape"),
        (raw({"a": entry("F32", [10**30], 0, 4)}, bytes(4)), "no valid shape"),
        (raw({"a": entry("F32", [2**62, 2**62], 0, 4)}, bytes(4)), "does not fit its data_offsets"),
        (raw({"a": entry("F32", [2], 0, 4)}, bytes(4)), "'a', F32 [2], does not fit its data_offsets: 0 to 4"),
        (raw({"a": entry("F32", [1], 4, 0)}, bytes(4)), "no valid data_offsets: [4, 0]"),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)), "no valid data_offsets"),
        (raw(GOOD, bytes(31)), "truncated: tensor 'b' ends at byte"),
        (raw(GOOD, bytes(10)), "truncated: tensor 'a' ends at byte"),
        (raw({**GOOD, "c": entry("F32", [1], 20, 24)}, bytes(32)), "'c' overlaps the one before it"),
        (raw({"a": entry("F32", [1], 4, 8)}, bytes(8)), "'a' does not begin where the one before it ends"),
        (raw(GOOD, bytes(40)), "8 bytes after the last tensor belong to none"),
    ],
)
def test_a_broken_file_is_named_with_its_fault(tmp_path: Path, content: bytes, words: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_header(tmp_path)


@given(st.data())
def test_no_change_of_a_byte_or_of_the_length_escapes_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(raw(GOOD, bytes(32)))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    path = write(tmp_path_factory.mktemp("fuzz"), bytes(content))
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert all(t.offset + t.size <= len(content) for t in tensors.values())
    json.dumps([t.shape for t in tensors.values()])
