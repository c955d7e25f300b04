"""`penstock plan` refuses what `penstock serve` refuses, with the same words and the same exit status."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.native.loader import instruction_sets
from tests.checkpoints import write_tiny_checkpoint
from tests.cli.conftest import RunCommand
from tests.cli.given.test_broken_models import (
    _garbled_config,
    _missing_tensor,
    _no_config,
    _no_tokenizer,
    _truncate,
    _unexpected_tensor,
    _unknown_architecture,
    _wrong_shape,
)


class EngineNotStarted:
    """Takes the place of the engine process. A test fails if it is sent a configuration to start with."""

    def __enter__(self) -> "EngineNotStarted":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send_config(self, config: object) -> None:
        raise AssertionError("serve did not refuse it, and started an engine")


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.serve.EngineChild", EngineNotStarted)
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _broken_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')


SETTINGS: tuple[tuple[str, ...], ...] = (
    ("--host", "0.0.0.0"),
    ("--host", "::"),
    ("--port", "65536"),
    ("--device", "cuda"),
    ("--quantization", "fp8"),
    ("--kv-cache-dtype", "fp8"),
    ("--quantization-group", "64"),
    ("--gpu-memory-utilization", "0.5"),
    ("--tensor-parallel-size", "3"),
    ("--pipeline-parallel-size", "9"),
    ("--expert-parallel", "--tensor-parallel-size", "2"),
    ("--threads", "4096"),
    ("--max-model-len", "100000"),
    ("--max-num-batched-tokens", "1"),
    ("--kv-cache-memory", "1KiB"),
    ("--kv-cache-memory", "900TiB"),
    ("--kv-cache-dtype", "int8", "--block-size", "8"),
    ("--event-log", "/no-such-folder/log"),
    ("--revision", "main"),
    ("--served-model-name", "a,a"),
    ("--config", "/no-such-file"),
)


def same_refusal(run_command: RunCommand, *arguments: str) -> str:
    """What both commands say, in one line. Neither has shown a plan or started an engine."""
    planned, served = (run_command(command, *arguments) for command in ("plan", "serve"))
    assert served.returncode == 2 and served.stderr.count("\n") == 1, served.stderr
    sizes = re.compile(r"[\d.]+ ?[MG]iB")  # of free memory, which changes
    assert planned.returncode == 2 and sizes.sub("?", planned.stderr) == sizes.sub("?", served.stderr)
    return served.stderr


@pytest.mark.parametrize("flags", SETTINGS, ids=" ".join)
def test_settings(run_command: RunCommand, tiny_checkpoint: Callable[..., Path], flags: tuple[str, ...]) -> None:
    said = same_refusal(run_command, str(tiny_checkpoint("qwen3")), *flags)
    assert flags[0] in said


@pytest.mark.parametrize(
    "break_it",
    [
        _no_weights,
        _only_pickles,
        _truncate,
        _missing_tensor,
        _unexpected_tensor,
        _wrong_shape,
        _unknown_architecture,
        _no_config,
        _garbled_config,
        _broken_generation_config,
    ],
    ids=lambda value: value.__name__.strip("_"),
)
def test_broken_models(run_command: RunCommand, tmp_path: Path, break_it: Callable[[Path], Any]) -> None:
    folder = write_tiny_checkpoint("qwen3", tmp_path / "model")
    break_it(folder)
    same_refusal(run_command, str(folder))


@pytest.mark.parametrize("flags", [("--quantization", "int8"), ("--kv-cache-dtype", "int8")], ids=" ".join)
def test_kernels_that_were_not_built(
    run_command: RunCommand,
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setenv("PENSTOCK_ISA", "none")
    instruction_sets.cache_clear()
    try:
        said = same_refusal(run_command, str(tiny_checkpoint("qwen3")), *flags)
    finally:
        instruction_sets.cache_clear()
    assert " ".join(flags) in said and "needs the native kernels" in said


def test_a_tokenizer_that_is_missing(run_command: RunCommand, tmp_path: Path) -> None:
    """`serve` reads it while the engine starts; `plan` refuses the model all the same."""
    folder = write_tiny_checkpoint("qwen3", tmp_path / "model")
    _no_tokenizer(folder)
    done = run_command("plan", str(folder))
    assert done.returncode == 2 and "tokenizer.json" in done.stderr and done.stderr.count("\n") == 1


def test_another_machine_needs_no_weights_here(run_command: RunCommand, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint("qwen3", tmp_path / "model")
    _no_weights(folder)
    assert run_command("plan", str(folder), "--hardware", "H100").returncode == 0
