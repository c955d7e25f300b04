"""Files and texts that are cut, mutated or made up: each is read, or refused with a message."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.messages import RequestRejected
from penstock.messages.tensors import LoadFailed, Tensor, check_data, check_shape
from penstock.repository.backend.arena import TensorArena
from penstock.repository.backend.files import HostileFile
from penstock.repository.backend.onnx_file import check_onnx
from penstock.repository.entry import Folder
from penstock.repository.settings import SettingsError
from penstock.repository.triton import read_pbtxt
from tests.repository import onnx_files as files
from tests.repository.test_settings import CONFIG

GOOD = files.add_sub()


def check(folder: Path, data: bytes) -> None:
    (folder / "model.onnx").write_bytes(data)
    check_onnx(folder / "model.onnx", folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=8), st.integers(0, 8))
def test_mutated_models(folder: Path, at: int, data: bytes, gone: int) -> None:
    with contextlib.suppress(HostileFile):
        check(folder, GOOD[:at] + data + GOOD[at + gone :])


@given(st.binary(max_size=200))
def test_bytes_that_are_no_model(folder: Path, data: bytes) -> None:
    with contextlib.suppress(HostileFile):
        check(folder, data)


@pytest.mark.parametrize("location", ["../x", "/etc/passwd", "a/../../x", "weights/../../x"])
def test_data_outside_the_folder(folder: Path, location: str) -> None:
    data = files.model([], [], [], [files.external_weight("w", [4], location)])
    with pytest.raises(HostileFile, match="outside its folder"):
        check(folder, data)


def test_data_within_the_folder(folder: Path) -> None:
    data = files.model([], [], [], [files.external_weight("w", [4], "weights.bin")])
    with pytest.raises(HostileFile, match=r"'weights.bin' is missing"):
        check(folder, data)
    (folder / "weights.bin").write_bytes(bytes(16))
    check(folder, data)
    (folder / "weights.bin").unlink()
    (folder / "weights.bin").symlink_to("/etc/hostname")
    with pytest.raises(HostileFile, match="leads out of the model's folder"):
        check(folder, data)
    (folder / "weights.bin").unlink()


@given(st.integers(0, len(CONFIG)), st.text(max_size=6), st.integers(0, 9))
def test_mutated_configurations(at: int, text: str, gone: int) -> None:
    with contextlib.suppress(SettingsError):
        read_pbtxt(CONFIG[:at] + text + CONFIG[at + gone :])


SHAPES = st.lists(st.integers(-2, 2**64), max_size=4).map(tuple)


@given(st.sampled_from(["FP32", "BYTES", "INT8", "what"]), SHAPES, st.binary(max_size=40))
def test_shapes_that_do_not_fit(datatype: str, shape: tuple[int, ...], data: bytes) -> None:
    with contextlib.suppress(RequestRejected):
        check_shape(Tensor("x", datatype, shape, data))
        check_data(Tensor("x", datatype, shape, data), "m")
        assert len(data) <= 40


def test_names_and_files_of_models(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for name, message in (
        ("../x", "path traversal"),
        ("a/b", "path traversal"),
        (" ", "cannot be empty"),
        (".hidden", "the name of a model has"),
        ("x" * 200, "the name of a model has"),
    ):
        with pytest.raises(LoadFailed, match=message):
            folder.read(name)
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to("/etc")
    assert folder.names() == ["real"]
    with pytest.raises(LoadFailed, match="there is no folder 'linked'"):
        folder.read("linked")
    with pytest.raises(LoadFailed, match="the kind of model is not known"):
        folder.read("real")
    (tmp_path / "real" / "1").mkdir()
    for file, what in (
        ("model.pt", "TorchScript model, .*torch.export.save"),
        ("saved_model.pb", "TensorFlow model, .*tf2onnx"),
    ):
        (tmp_path / "real" / "1" / file).touch()
        with pytest.raises(LoadFailed, match=what):
            folder.read("real")
        (tmp_path / "real" / "1" / file).unlink()
    for text in ("model.yaml", "config.pbtxt"):
        (tmp_path / "real" / text).touch()
    with pytest.raises(LoadFailed, match="keep one of them"):
        folder.read("real")
    with pytest.raises(ValueError, match="there is no such folder"):
        Folder(tmp_path / "nowhere")


def test_a_version_is_its_content(tmp_path: Path) -> None:
    files.put(tmp_path, "m", GOOD, settings="instances: 1")
    folder = Folder(tmp_path)
    (one,) = folder.read("m").targets
    assert folder.read("m").targets[0].digest == one.digest and one.size == len(GOOD)
    (tmp_path / "m" / "model.yaml").write_text("instances: 2")
    (two,) = folder.read("m").targets
    files.put(tmp_path, "m", files.scale(2), settings="instances: 1")
    (three,) = folder.read("m").targets
    assert len({one.digest, two.digest, three.digest}) == 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=40))
def test_the_shared_memory_is_divided_without_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = TensorArena(16_384)
    taken: dict[int, int] = {}
    try:
        for takes, number in steps:
            if takes:
                start = arena.take(number)
                if start is not None:
                    end = start + max(number, 1)
                    assert end <= arena.size and start % 64 == 0
                    assert all(end <= other or start >= other + size for other, size in taken.items())
                    taken[start] = max(number, 1)
            elif taken:
                start = sorted(taken)[number % len(taken)]
                del taken[start]
                arena.give(start)
        for start in taken:
            arena.give(start)
        assert arena.used == 0 and arena.take(16_384) == 0
    finally:
        arena.close()
