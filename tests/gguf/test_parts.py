"""A model in several files: found from any of them, and checked."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.families import load_spec
from penstock.gguf import GgufError, is_gguf, model_name, part_name, read_gguf
from penstock.weights.checkpoint import check_tensors, stored_tensors
from tests.gguf.raw import raw_file, raw_key
from tests.gguf_models import write_gguf


@pytest.fixture(scope="module")
def whole(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_checkpoint("qwen3"), tmp_path_factory.mktemp("whole") / "m.gguf")


@pytest.fixture
def split(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return write_gguf(tiny_checkpoint("qwen3"), tmp_path / "m.gguf", split_tensors=15)


def test_any_part_gives_the_whole_model(whole: Path, split: Path) -> None:
    expected = read_gguf(whole)
    names = sorted(path.name for path in split.parent.iterdir())
    assert names == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in names:
        file = read_gguf(split.with_name(name))
        assert file.path == split
        ours = {key: value for key, value in file.metadata.items() if not key.startswith("split.")}
        assert ours == expected.metadata
        assert {t.name: (t.type, t.shape) for t in file.tensors.values()} == {
            t.name: (t.type, t.shape) for t in expected.tensors.values()
        }
        for tensor in file.tensors.values():
            there = expected.tensors[tensor.name]
            assert _content(tensor.path, tensor.offset, tensor.size) == _content(whole, there.offset, there.size)
        spec = load_spec(split.with_name(name))
        assert spec == load_spec(whole)
        check_tensors(spec, stored_tensors(split.with_name(name)))


def _content(path: Path, offset: int, size: int) -> bytes:
    return path.read_bytes()[offset : offset + size]


def test_a_missing_part_is_named(split: Path) -> None:
    split.with_name("m-00002-of-00003.gguf").unlink()
    with pytest.raises(GgufError, match=r"part 2 of 3 is missing: m-00002-of-00003.gguf; download it"):
        read_gguf(split)


def test_a_broken_part_is_named(split: Path) -> None:
    part = split.with_name("m-00003-of-00003.gguf")
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(GgufError, match=r"m-00003-of-00003.gguf: truncated"):
        read_gguf(split)


def test_parts_of_other_models_are_refused(split: Path) -> None:
    shutil.copy(split.with_name("m-00003-of-00003.gguf"), split.with_name("m-00002-of-00003.gguf"))
    with pytest.raises(GgufError, match=r"m-00002-of-00003.gguf: split.no is 2; expected 1"):
        read_gguf(split)


def test_a_renamed_part_is_refused(split: Path) -> None:
    other = split.rename(split.with_name("model.gguf"))
    with pytest.raises(GgufError, match=r"split.count is 3, so its name must be like NAME-00001-of-00003.gguf"):
        read_gguf(other)


def test_the_number_of_tensors_is_checked(tmp_path: Path) -> None:
    for i in range(2):
        keys = [
            raw_key("split.count", 2, struct.pack("<H", 2)),
            raw_key("split.no", 2, struct.pack("<H", i)),
            raw_key("split.tensors.count", 5, struct.pack("<i", 7)),
        ]
        raw_file(tmp_path, keys=keys).rename(tmp_path / f"x-0000{i + 1}-of-00002.gguf")
    with pytest.raises(GgufError, match=r"split.tensors.count is 7, but the parts have 0 tensors"):
        read_gguf(tmp_path / "x-00002-of-00002.gguf")


@pytest.mark.parametrize("count", [struct.pack("<H", 0), struct.pack("<H", 60_000)])
def test_a_wrong_count_is_refused(tmp_path: Path, count: bytes) -> None:
    path = raw_file(tmp_path, keys=[raw_key("split.count", 2, count)])
    with pytest.raises(GgufError, match=r"split.count is \d+, so its name"):
        read_gguf(path)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = raw_file(tmp_path, keys=[raw_key("a", 0, b"\1")])
    assert read_gguf(path).metadata == {"a": 1}
    assert read_gguf(path).metadata is read_gguf(path).metadata
    path.unlink()
    raw_file(tmp_path, keys=[raw_key("ab", 0, b"\2")])
    assert read_gguf(path).metadata == {"ab": 2}


def test_names() -> None:
    part = part_name("llama-3-00002-of-00010.gguf")
    assert part is not None and (part.stem, part.number, part.count) == ("llama-3", 2, 10)
    assert part.sibling(10) == "llama-3-00010-of-00010.gguf"
    assert part_name("a-00003-of-00002.gguf") is None and part_name("a-00000-of-00002.gguf") is None
    assert model_name(Path("/x/a.Q4_K_M.gguf")) == "a.Q4_K_M"
    assert model_name(Path("/x/a.Q4_K_M-00001-of-00002.gguf")) == "a.Q4_K_M"


def test_a_folder_is_not_a_file_of_this_format(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    assert not is_gguf(tmp_path / "folder.gguf") and not is_gguf(tmp_path / "m.safetensors")
    assert is_gguf(tmp_path / "missing.gguf") and is_gguf(tmp_path / "M.GGUF")
