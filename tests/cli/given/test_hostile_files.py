"""A model's folder made to stop or to hang what reads it: one line, at once."""

import os
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.text import Tokenizer, TokenizerError
from tests.checkpoints import write_tiny_checkpoint
from tests.cli.conftest import RunCommand
from tests.cli.given.test_broken_models import COMMAND, names_what_is_wrong
from tests.cli.test_help import penstock

DEEP = 100_000
FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "model.safetensors.index.json"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change."""
    target = tmp_path / "model"
    target.mkdir()
    for path in model.iterdir():
        (target / path.name).symlink_to(path)
    return target


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(text)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ['{"a":' * DEEP + "1" + "}" * DEEP, '{"a":' + "[" * DEEP + "]" * DEEP + "}"])
def test_json_that_is_too_deep(folder: Path, name: str, text: str, run_command: RunCommand) -> None:
    put(folder, name, text)
    if name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        with pytest.raises(TokenizerError, match=name):
            Tokenizer.load(folder)
    done = run_command("run", str(folder), *COMMAND)
    assert names_what_is_wrong(done.returncode, done.stderr, [name]), done.stderr


@pytest.mark.parametrize("name", [*FILES, "model.safetensors", "chat_template.jinja", "model.gguf"])
@pytest.mark.parametrize("kind", ["FIFO", "socket", "character device"])
def test_files_that_never_end(folder: Path, name: str, kind: str, run_command: RunCommand) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(folder / name)
    elif kind == "character device":
        (folder / name).symlink_to("/dev/zero")
    else:
        here = os.open(folder, os.O_RDONLY)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(f"/proc/self/fd/{here}/{name}")
        os.close(here)
    done = run_command("plan", str(folder))
    assert names_what_is_wrong(done.returncode, done.stderr, [name, kind]), done.stderr


def test_a_model_that_computes_no_token_is_never_ready(folder: Path) -> None:
    tensors = {name: torch.full_like(each, torch.nan) for name, each in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done = penstock("run", str(folder), *COMMAND)
    assert names_what_is_wrong(done.returncode, done.stderr, ["not finite", "download them again"]), done.stderr
