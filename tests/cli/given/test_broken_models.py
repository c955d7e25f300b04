"""A model's folder with something wrong in it: one clear line that names it, and nothing left running."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoints import write_tiny_checkpoint
from tests.cli.conftest import RunCommand
from tests.cli.test_help import penstock


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _change_tensors(folder: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _missing_tensor(folder: Path) -> None:
    _change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def _unexpected_tensor(folder: Path) -> None:
    _change_tensors(folder, lambda tensors: tensors.update(surprise=tensors["model.norm.weight"].clone()))


def _wrong_shape(folder: Path) -> None:
    name = "model.norm.weight"
    _change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))


def _unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _garbled_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"')


COMMAND = ("hello", "--max-tokens", "1", "--kv-cache-memory", "8MiB")


def names_what_is_wrong(status: int, stderr: str, words: list[str]) -> bool:
    """Whether a command says it in a line, and ended so."""
    (line,) = (line for line in stderr.splitlines() if line.startswith("penstock: "))
    return status != 0 and "Traceback" not in stderr and all(word in line for word in words)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (_missing_tensor, ["model.layers.1.mlp.up_proj.weight"]),
        (_unexpected_tensor, ["surprise"]),
        (_wrong_shape, ["model.norm.weight"]),
        (_unknown_architecture, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        (_no_tokenizer, ["tokenizer.json"]),
        (_no_config, ["config.json"]),
        (_garbled_config, ["config.json"]),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("_"),
)
def test_the_error_names_what_is_wrong(
    break_it: Callable[[Path], None], words: list[str], tmp_path: Path, run_command: RunCommand
) -> None:
    folder = write_tiny_checkpoint("qwen3", tmp_path / "model")
    break_it(folder)
    done = run_command("run", str(folder), *COMMAND)
    assert names_what_is_wrong(done.returncode, done.stderr, words), done.stderr


def test_a_process_of_its_own_says_so_too(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint("qwen3", tmp_path / "model")
    _truncate(folder)
    done = penstock("run", str(folder), *COMMAND)
    assert names_what_is_wrong(done.returncode, done.stderr, ["model.safetensors"]), done.stderr
