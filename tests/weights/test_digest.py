"""The digest of a model's weights covers every byte, and is computed again only if a file may have changed."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.weights import digest as module
from penstock.weights.digest import WeightsDigest
from penstock.weights.manifest import Sums
from penstock.weights.packaged import embedded_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with a small model, whose file counts as large and is older than two seconds."""
    monkeypatch.setattr(module, "REMEMBERED_BYTES", 1)
    monkeypatch.setattr(module, "SETTLED_SECONDS", -10.0)
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    return folder


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read."""
    files: list[Path] = []

    class Counted(Sums):
        def __init__(self, todo: Iterable[Path], *rest: object) -> None:
            files.extend(todo)
            super().__init__(todo, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "Sums", Counted)
    return files


def digest_of(model: Path) -> str:
    return WeightsDigest(model, model.parent / "cache" / "sha256.json").result()


def change(path: Path, offset: int) -> None:
    """Change one byte, and let the file look as it did as far as a program can."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_every_byte_counts(model: Path) -> None:
    size = (model / WEIGHTS).stat().st_size
    digests = {digest_of(model)}
    for offset in (size - 1, size // 2 + 12345, size // 3):
        change(model / WEIGHTS, offset)
        digests.add(digest_of(model))
    assert len(digests) == 4 and all(len(each) == 64 for each in digests)


def test_names_and_places_do_not_count(model: Path) -> None:
    first = digest_of(model)
    moved = model.parent / "moved"
    model.rename(moved)
    assert digest_of(moved) == first


def test_a_file_that_has_not_changed_is_read_once(model: Path, read: list[Path]) -> None:
    first = digest_of(model)
    assert digest_of(model) == first and read == [model / WEIGHTS]
    change(model / WEIGHTS, 1_000_000)
    assert digest_of(model) != first and len(read) == 2


def test_a_file_that_changed_a_moment_ago_is_not_remembered(
    model: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_SECONDS", 3600.0)
    assert digest_of(model) == digest_of(model) and len(read) == 2


def test_a_small_file_is_not_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED_BYTES", (model / WEIGHTS).stat().st_size + 1)
    digest_of(model)
    assert not (model.parent / "cache").exists()


@pytest.mark.parametrize("content", ["", "[]", '{"a": 7}', '{"a": []}', "\0"])
def test_a_damaged_memory_is_forgotten(model: Path, read: list[Path], content: str) -> None:
    memory = model.parent / "cache" / "sha256.json"
    memory.parent.mkdir()
    memory.write_text(content)
    first = digest_of(model)
    assert digest_of(model) == first and len(read) == 1


def test_a_memory_that_cannot_be_written_costs_time_only(model: Path, read: list[Path]) -> None:
    (model.parent / "cache").write_text("a file where the folder should be")
    assert digest_of(model) == digest_of(model) and len(read) == 2


def test_the_memory_is_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REMEMBERED", 3)
    for index in range(5):
        folder = model.parent / str(index)
        shutil.copytree(model, folder)
        digest_of(folder)
    names = list(json.loads((model.parent / "cache" / "sha256.json").read_text()))
    assert names == [str(model.parent / str(index) / WEIGHTS) for index in (2, 3, 4)]


def test_a_file_that_is_read_again_is_the_last_to_be_forgotten(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REMEMBERED", 2)
    other = model.parent / "other"
    shutil.copytree(model, other)
    for folder in (model, other):
        digest_of(folder)
    change(model / WEIGHTS, 1_000_000)
    digest_of(model)
    third = model.parent / "third"
    shutil.copytree(model, third)
    digest_of(third)
    names = list(json.loads((model.parent / "cache" / "sha256.json").read_text()))
    assert names == [str(folder / WEIGHTS) for folder in (model, third)]


def test_a_file_that_cannot_be_read_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(self: WeightsDigest, *_: object) -> str:
        raise FileNotFoundError(2, "removed meanwhile", str(model / WEIGHTS))

    monkeypatch.setattr(Sums, "_sum", removed)
    with pytest.raises(OSError, match=WEIGHTS):
        digest_of(model)
