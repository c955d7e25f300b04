"""SHA256SUMS beside a model: what it must be, what it finds, and that `sha256sum` agrees."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.families.checkpoint.stored import CheckpointError
from penstock.weights.manifest import NAME, ManifestCheck, read_manifest, write_manifest
from penstock.weights.packaged import embedded_model
from tests.smollm2 import smollm2

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of its own with a small model, which has a manifest."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_model(), folder)
    write_manifest(folder, lambda count: None)
    return folder


def refusal(model: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        ManifestCheck(model).result()
    return str(error.value)


def flip(path: Path) -> None:
    """Changes one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_it_is_what_sha256sum_writes_and_checks(model: Path) -> None:
    checked = subprocess.run(["sha256sum", "--strict", "-c", NAME], cwd=model, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    found = ManifestCheck(model).result()
    assert found is not None and found.files == len(list(model.iterdir())) - 1
    assert found.bytes == sum(path.stat().st_size for path in model.iterdir() if path.name != NAME)
    for options in ("", "--binary"):
        subprocess.run(f"sha256sum {options} ./*.json *.safetensors > sums && mv sums {NAME}", shell=True, cwd=model)
        assert ManifestCheck(model).result() is not None, options


@pytest.mark.parametrize("file", [WEIGHTS, "tokenizer.json"])
def test_one_wrong_bit_is_a_line_with_both_sums(model: Path, file: str) -> None:
    right = hashlib.sha256((model / file).read_bytes()).hexdigest()
    flip(model / file)
    wrong = hashlib.sha256((model / file).read_bytes()).hexdigest()
    said = refusal(model)
    assert said.startswith(f"{model / file} has the SHA-256 {wrong}, but {right} is expected") and "\n" not in said


def test_without_a_manifest_nothing_is_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / NAME).unlink()
    monkeypatch.setattr("penstock.weights.manifest.model_files", lambda model: pytest.fail("files were listed"))
    assert read_manifest(model) is None
    assert ManifestCheck(model).result() is None


def test_what_is_no_manifest(model: Path) -> None:
    def becomes(text: str) -> str:
        (model / NAME).write_text(text)
        return refusal(model)

    right = (model / NAME).read_text()
    assert "line 1: 'SHA256 (a) = 00' is not a SHA-256" in becomes("SHA256 (a) = 00\n")
    assert f"{WEIGHTS} is there twice, with different sums" in becomes(f"{right}{'0' * 64}  {WEIGHTS}\n")
    lines = [line for line in right.splitlines() if not line.endswith(WEIGHTS)]
    assert f"does not list {WEIGHTS}, which has weights" in becomes("\n".join(lines))
    assert "is no file of at most 1 MiB" in becomes("x" * (1 << 20) + "y")
    (model / NAME).write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in refusal(model)
    (model / NAME).unlink()
    os.mkfifo(model / NAME)
    assert "is no file of at most" in refusal(model)


def test_lines_about_other_files_do_not_count(model: Path) -> None:
    with (model / NAME).open("a") as file:
        file.write(f"\n# a comment\n{'0' * 64}  onnx/model.onnx\n{'0' * 64}  pytorch_model.bin\n")
    assert ManifestCheck(model).result() is not None


def test_models_that_share_a_folder_share_the_manifest(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(smollm2(), tmp_path / name)
        write_manifest(tmp_path / name, lambda count: None)
    assert (tmp_path / NAME).read_text().count("gguf") == 2
    flip(tmp_path / "b.gguf")
    assert ManifestCheck(tmp_path / "a.gguf").result() is not None
    assert "b.gguf has the SHA-256" in refusal(tmp_path / "b.gguf")


def test_a_file_that_is_not_the_hubs_is_found(model: Path) -> None:
    """The hub's cache names a large file by its SHA-256, and links to it."""
    blob = model.parent / hashlib.sha256((model / WEIGHTS).read_bytes()).hexdigest()
    (model / WEIGHTS).rename(blob)
    (model / WEIGHTS).symlink_to(blob)
    write_manifest(model, lambda count: None)
    flip(blob)
    with pytest.raises(CheckpointError, match=f"but {blob.name} is expected"):
        write_manifest(model, lambda count: None)


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    def run(*words: object) -> "subprocess.CompletedProcess[str]":
        line = [sys.executable, "-m", "penstock", *map(str, words)]
        return subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=tmp_path)

    return run


SMALL = ("--threads", 1, "--kv-cache-memory", "32MiB")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "MODEL", "--port", 0),
        pytest.param(("run", "MODEL", "def f(", "--raw", "--max-tokens", 2), marks=pytest.mark.rare),
    ],
)
def test_a_damaged_model_does_not_start(
    model: Path, command: Callable[..., "subprocess.CompletedProcess[str]"], words: tuple[object, ...]
) -> None:
    content = bytearray((model / WEIGHTS).read_bytes())
    content[-100] ^= 1
    (model / WEIGHTS).write_bytes(content)
    done = command(*(model if word == "MODEL" else word for word in words), *SMALL)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert last.startswith(f"penstock: {model / WEIGHTS} has the SHA-256 ") and " is expected: " in last
    assert "Traceback" not in done.stderr


@pytest.mark.rare
def test_show_and_manifest_say_what_is_checked(
    model: Path, command: Callable[..., "subprocess.CompletedProcess[str]"]
) -> None:
    (model / NAME).unlink()
    assert "none (penstock manifest)" in command("show", model).stdout
    assert command("manifest", model, "--check").stderr.endswith(f"write it: penstock manifest {model}\n")
    assert "files," in command("manifest", model).stdout
    assert "files are checked at every start (SHA256SUMS)" in command("show", model).stdout
    assert "have the SHA-256 of SHA256SUMS" in command("manifest", model, "--check").stdout
    assert command("run", model, "def f(", "--raw", "--max-tokens", 2, *SMALL).returncode == 0
