"""Commands with a model in GGUF: its name, the types that `plan` shows, and the errors of broken files."""

import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.config import detect_hardware
from penstock.prepare.model import find_model
from tests.cli.conftest import RunCommand
from tests.cli.test_help import penstock
from tests.gguf_models import write_gguf
from tests.patience import AT_ONCE

Written = Callable[..., Path]


@pytest.fixture
def written(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Written:
    def write(variant: str = "qwen3", **options: Any) -> Path:
        (tmp_path / "models").mkdir(exist_ok=True)
        return write_gguf(tiny_checkpoint(variant), tmp_path / "models" / "tiny.Q8_0.gguf", kind="Q8_0", **options)

    return write


def test_plan_shows_the_types_of_a_file(run_command: RunCommand, written: Written, tmp_path: Path) -> None:
    out, path = tmp_path / "plan.json", written(kinds={"token_embd.weight": "F16"})
    done = run_command("plan", str(path), "--json", str(out))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    summary = next(place for place, line in enumerate(lines) if line.startswith("tiny.Q8_0: qwen3, "))
    assert lines[summary + 1].strip() == "Types in tiny.Q8_0.gguf"
    plan = json.loads(out.read_text())
    assert plan["model"]["family"] == "qwen3"
    assert [row["type"] for row in plan["types"]] == ["Q8_0", "F16", "F32"]
    q8, f16, f32 = plan["types"]
    # Per layer q, k, v, output, gate and up are Q8_0; down has rows of 112 values, which are not whole blocks.
    weights = 3 * (192 * 64 + 2 * 96 * 64 + 64 * 192 + 2 * 112 * 64)
    assert (q8["tensors"], q8["weights"], q8["bytes"]) == (18, weights, weights * 34 // 32)
    assert f16 == {"type": "F16", "tensors": 4, "weights": 307 * 64 + 3 * 112 * 64, "bytes": 2 * (307 + 336) * 64}
    assert f32["tensors"] == 3 * 4 + 1
    assert any("Q8_0" in line and " 8.5 bits (1.00×) " in line for line in lines)
    memory = next(row["bytes"] for row in plan["memory"] if row["name"] == "weights")
    assert plan["weights_in_memory"] == memory
    ratio = memory / sum(row["bytes"] for row in plan["types"])
    assert any(re.fullmatch(rf"All weights: .* in the file, .* in memory \({ratio:.2f}×\)", line) for line in lines)


def test_the_name_is_the_files(written: Written) -> None:
    path = written(split_tensors=20)
    assert path.name == "tiny.Q8_0-00001-of-00002.gguf"
    for model in (path, path.with_name("tiny.Q8_0-00002-of-00002.gguf"), path.parent):
        resolved = find_model(str(model), {}).resolve(detect_hardware())
        assert resolved.server.served_model_name == resolved.engine.name == "tiny.Q8_0"
        assert Path(resolved.engine.model).is_file()


@pytest.mark.parametrize("variant", ["llama3", "gemma3"])
def test_a_file_answers_as_its_checkpoint(
    variant: str, tiny_checkpoint: Callable[..., Path], tmp_path: Path, run_command: RunCommand
) -> None:
    """Tokenizer, weights and end tokens from the file alone."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(variant), folder)
    config = json.loads((folder / "config.json").read_text())
    if variant == "gemma3":  # a file does not have it: it follows from the size of a head
        config["query_pre_attn_scalar"] = config["head_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    path = write_gguf(folder, tmp_path / "tiny.gguf")
    flags = ("The pipe that keeps a turbine", "--max-tokens", "24", "--kv-cache-memory", "8MiB", "--dtype", "float32")
    expected, found = (
        run_command("run", str(model), *flags, "--raw", "--temperature", "0") for model in (folder, path)
    )
    assert found.returncode == 0, found.stderr
    assert len(found.stdout) > 24 and found.stdout == expected.stdout


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _other_format(path: Path) -> None:
    path.write_bytes(b"\x80\2}q\0." * 100)


def _other_version(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:4] + b"\1" + data[5:])


def _many_tensors(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:8] + b"\xff" * 8 + data[16:])


def _gone(path: Path) -> None:
    path.unlink()


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_cut, "truncated, or a wrong header: tensor"),
    (_empty, "is empty; download it again"),
    (_other_format, "is a pickle or a zip archive"),
    (_other_version, "GGUF version 1 is not supported; supported: 2 and 3"),
    (_many_tensors, "18446744073709551615 tensors, more than the"),
    (_gone, "there is no file or folder"),
]


ANY_PORT = {"serve": ("--port", "0")}  # another program may have the usual one


@pytest.mark.parametrize("command", ["plan", "serve", "run"])
@pytest.mark.parametrize(("break_it", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", "").strip("_"))
def test_a_broken_file_is_one_line(
    break_it: Callable[[Path], None], words: str, command: str, written: Written, run_command: RunCommand
) -> None:
    path = written()
    break_it(path)
    done = run_command(command, str(path), *ANY_PORT.get(command, ()))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("penstock: ") and words in line and path.name in line, done.stderr


@pytest.mark.parametrize("command", ["serve", "plan", "run"])
def test_a_process_of_its_own_ends_at_once(command: str, written: Written) -> None:
    path = written()
    _many_tensors(path)
    flags, began = ANY_PORT.get(command, ()), time.perf_counter()
    assert penstock(command, str(path.with_name("absent.gguf")), *flags).returncode == 2
    usual = time.perf_counter() - began
    done = penstock(command, str(path), *flags)
    assert time.perf_counter() - began < 2 * usual + AT_ONCE
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr


def test_an_unknown_architecture_lists_those_that_are_known(written: Written, run_command: RunCommand) -> None:
    path = written()
    data = path.read_bytes()
    at = data.index(b"qwen3")
    path.write_bytes(data[:at] + b"mamba" + data[at + 5 :])
    done = run_command("serve", str(path), *ANY_PORT["serve"])
    assert done.returncode == 2
    assert "general.architecture is 'mamba', which is not supported" in done.stderr


def test_several_files_are_listed(written: Written, run_command: RunCommand) -> None:
    path = written()
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    done = run_command("plan", str(path.parent))
    assert done.returncode == 2
    assert "has 2 models in GGUF; name one of: other.gguf, tiny.Q8_0.gguf" in done.stderr
