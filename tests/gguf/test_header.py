"""The parser against the gguf package on files that the package writes, and on files that are wrong."""

import os
import random
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.families import UnsupportedModel, load_spec
from penstock.families.checkpoint.stored import CheckpointError
from penstock.gguf import TYPES, GgufError, parts, read_floats
from penstock.gguf import header as limits
from penstock.gguf.header import Header, read_header
from penstock.gguf.types import OTHER_NAMES, TYPES_BY_NUMBER
from penstock.weights.checkpoint import check_tensors, stored_tensors
from tests.frontend.loop_time import slowness
from tests.gguf.raw import raw_file, raw_key, raw_string
from tests.gguf.wrong import WRONG
from tests.gguf_models import write_gguf

MUTATIONS = 10_000
SECONDS = 1.0  # of processor time, for a file of some 100 KB; the slowest takes some ms


def test_types_are_those_of_the_gguf_package() -> None:
    for kind in TYPES.values():
        assert GGMLQuantizationType[kind.name] == kind.number
        assert GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]] == (kind.block_values, kind.block_bytes)
    assert {**OTHER_NAMES, **{number: kind.name for number, kind in TYPES_BY_NUMBER.items()}} == {
        kind.value: kind.name for kind in GGMLQuantizationType
    }


def read_by_the_package(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata, tensors) as gguf.GGUFReader has them."""
    reader = GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(map(int, reversed(tensor.shape))),
            tensor.data_offset,
            tensor.n_bytes,
        )
        for tensor in reader.tensors
    }
    return metadata, tensors


def assert_same(path: Path) -> Header:
    header = read_header(path)
    metadata, tensors = read_by_the_package(path)
    assert repr(header.metadata) == repr(metadata)  # with nan
    assert {t.name: (t.type.name, t.shape, t.offset, t.size) for t in header.tensors.values()} == tensors
    return header


REAL_FILES = [Path(name) for name in os.environ.get("PENSTOCK_GGUF_FILES", "").split(os.pathsep) if name]


@pytest.mark.skipif(not REAL_FILES, reason="PENSTOCK_GGUF_FILES names no files")
def test_real_files_are_read_as_the_package_reads_them() -> None:
    for path in REAL_FILES:
        assert_same(path)


NUMBERS: dict[GGUFValueType, st.SearchStrategy[Any]] = {
    GGUFValueType.UINT8: st.integers(0, 2**8 - 1),
    GGUFValueType.INT8: st.integers(-(2**7), 2**7 - 1),
    GGUFValueType.UINT16: st.integers(0, 2**16 - 1),
    GGUFValueType.INT16: st.integers(-(2**15), 2**15 - 1),
    GGUFValueType.UINT32: st.integers(0, 2**32 - 1),
    GGUFValueType.INT32: st.integers(-(2**31), 2**31 - 1),
    GGUFValueType.UINT64: st.integers(0, 2**64 - 1),
    GGUFValueType.INT64: st.integers(-(2**63), 2**63 - 1),
    GGUFValueType.FLOAT32: st.floats(width=32),
    GGUFValueType.FLOAT64: st.floats(),
    GGUFValueType.BOOL: st.booleans(),
    GGUFValueType.STRING: st.text(st.characters(exclude_categories=["Cs"])),
}


@st.composite
def values(draw: st.DrawFn) -> tuple[GGUFValueType, GGUFValueType | None, Any]:
    """(type, type of an array's items, value)."""
    kind = draw(st.sampled_from(list(NUMBERS)))
    if draw(st.booleans()):
        return kind, None, draw(NUMBERS[kind])
    return GGUFValueType.ARRAY, kind, draw(st.lists(NUMBERS[kind], min_size=1, max_size=5))


@settings(max_examples=200, deadline=None)
@given(
    metadata=st.dictionaries(st.from_regex(r"[a-z]{1,8}\.[a-z0-9_.]{1,20}", fullmatch=True), values(), max_size=8),
    kinds=st.lists(st.sampled_from([kind for kind in TYPES if kind != "MXFP4"]), max_size=5),
    alignment=st.sampled_from([8, 32, 64, 4096]),
)
def test_written_files_are_read_as_the_package_reads_them(
    tmp_path_factory: pytest.TempPathFactory,
    metadata: dict[str, tuple[GGUFValueType, GGUFValueType | None, Any]],
    kinds: list[str],
    alignment: int,
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for key, (kind, items, value) in metadata.items():
        writer.add_key_value(key, value, kind, items)
    for i, name in enumerate(kinds):
        kind = TYPES[name]
        data = np.full((i + 1, 2, 2 * kind.block_bytes), i, np.uint8)
        writer.add_tensor(f"tensor.{i}", data, raw_dtype=GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same(path)


def test_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 5, 6)
    empty = struct.pack("<IQ", 8, 0)
    value = struct.pack("<IQ", 9, 2) + inner + empty
    path = raw_file(tmp_path, keys=[raw_key("a", 9, value)])
    assert read_header(path).metadata["a"] == [[5, 6], []]


def test_a_tensor_is_found_where_its_bytes_are(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([0.5, -1.25], np.float32)
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = read_header(tmp_path / "m.gguf").tensors
    assert tensors["first"].shape == (2, 3) and read_floats(tensors["first"]) == tuple(first.reshape(-1))
    assert read_floats(tensors["second"]) == (0.5, -1.25)


def test_a_large_vocabulary_takes_less_than_half_a_second(tmp_path: Path) -> None:
    tokens = b"".join(raw_string(f"token{i}") for i in range(150_000))
    merges = b"".join(raw_string(f"tok en{i}") for i in range(300_000))
    keys = [
        raw_key("tokens", 9, struct.pack("<IQ", 8, 150_000) + tokens),
        raw_key("merges", 9, struct.pack("<IQ", 8, 300_000) + merges),
        raw_key("kinds", 9, struct.pack("<IQ", 5, 150_000) + bytes(600_000)),
    ]
    path = raw_file(tmp_path, keys=keys)
    best = min(_seconds(lambda: read_header(path)) for _ in range(5))
    assert read_header(path).metadata["merges"][-1] == "tok en299999"
    assert best < 0.5 * slowness()


def _seconds(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return time.thread_time() - began


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_refused(case: str, tmp_path: Path) -> None:
    parts_of_file, expected = WRONG[case]
    path = raw_file(tmp_path, **parts_of_file)
    with pytest.raises(GgufError) as caught:
        read_header(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 500
    assert re.search(expected, text), text


def test_the_text_and_the_values_of_a_header_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strings = struct.pack("<IQ", 8, 3) + raw_string("abcd") * 3
    path = raw_file(tmp_path, keys=[raw_key("a", 9, strings), raw_key("b", 9, strings)])
    assert read_header(path).metadata["b"] == ["abcd"] * 3
    monkeypatch.setattr(limits, "MAX_TEXT_BYTES", 23)
    with pytest.raises(GgufError, match="metadata 'b' has too much text: all strings may have 23 bytes"):
        read_header(path)
    monkeypatch.setattr(limits, "MAX_VALUES", 5)
    with pytest.raises(GgufError, match="metadata 'b' has 3 values; all metadata may have 5"):
        read_header(path)


@pytest.mark.parametrize(
    ("make", "expected"), [(Path.mkdir, "not a file"), (os.mkfifo, "not a file"), (None, "no such file")]
)
def test_what_is_not_a_file_is_refused(make: Any, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    if make is not None:
        make(path)
    with pytest.raises(GgufError, match=expected):
        read_header(path)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_checkpoint("llama3"), tmp_path_factory.mktemp("mutated") / "m.gguf", kind="Q8_0")


def test_a_file_cut_anywhere_is_refused(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    end = min(tensor.offset for tensor in read_header(model).tensors.values())
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    for size in [*range(len(data) - 1, end, -4999), *range(end, -1, -7)]:
        os.truncate(path, size)
        with pytest.raises(GgufError):
            read_header(path)


def test_mutated_headers_are_read_or_refused(model: Path, tmp_path: Path) -> None:
    """Through all that looks at a file before its tensors are read: no other error than one for the user, in time."""
    good = model.read_bytes()
    end = min(tensor.offset for tensor in read_header(model).tensors.values())
    path, draw, errors = tmp_path / "m.gguf", random.Random(1), set()
    path.write_bytes(good)
    with path.open("r+b") as file:
        for number in range(MUTATIONS):
            mutated = _mutated(good[:end], draw)
            file.seek(0)
            file.write(mutated)
            file.flush()
            parts._parsed.cache_clear()  # by time of change, which two mutations may share
            began = time.thread_time()
            text = _error_of(path)
            assert time.thread_time() - began < SECONDS, number
            assert "\n" not in text, number
            errors.add(re.sub(r"\d+|'.*?'|\[.*?\]", "", text))
            file.seek(0)
            file.write(good[:end])
    assert len(errors) > 100


def _error_of(path: Path) -> str:
    try:
        spec = load_spec(path)
        check_tensors(spec, stored_tensors(path))
    except (GgufError, UnsupportedModel, CheckpointError) as error:
        return str(error)
    return ""


def _mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to three changes, as many as before."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        at = draw.randrange(len(data) - 8) if draw.random() < 0.8 else draw.randrange(64)
        what = draw.randrange(5)
        if what == 0:
            changed[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            changed[at] = draw.randrange(256)
        elif what == 2:
            value = draw.choice([0, 1, len(data), 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, draw.getrandbits(64)])
            changed[at : at + 8] = struct.pack("<Q", value)
        elif what == 3:
            changed[at : at + 4] = struct.pack("<I", draw.choice([0, 1, 9, 13, 2**31, 2**32 - 1]))
        else:
            size = draw.randrange(1, 40)
            changed = changed[:at] + changed[at + size :] + bytes(min(size, len(changed) - at))
    return bytes(changed[: len(data)].ljust(len(data), b"\0"))
