"""A model that transformers' code executes, on the command line: announced, and refused with what it does not have."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand
from tests.models.other_models import write_other


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_other("Helium", tmp_path_factory.mktemp("helium"))


def test_plan_says_who_executes_it(run_command: RunCommand, folder: Path) -> None:
    output = " ".join(run_command("plan", str(folder)).stdout.split())
    assert "transformers' code executes HeliumForCausalLM, with Penstock's attention: slower" in output
    assert "Python, torch and transformers" in output
    assert "int8" not in output  # of the quantisations that are possible


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--speculation", "ngram"], "set --speculation auto or off"),
        (["--device", "cuda", "--hardware", "H100"], "--device cpu"),
        (["--quantization", "int8"], "--quantization none"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype auto"),
        (["--distributed-executor", "ray"], "--distributed-executor auto"),
        (["--tensor-parallel-size", "2"], "leave --tensor-parallel-size"),
    ],
)
def test_what_it_cannot_be_combined_with(run_command: RunCommand, folder: Path, flags: list[str], words: str) -> None:
    result = run_command("plan", str(folder), *flags)
    assert result.returncode == 2 and "HeliumForCausalLM" in result.stderr and words in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_transformers_the_error_says_what_to_install(
    run_command: RunCommand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find: Callable[..., object] = importlib.util.find_spec
    monkeypatch.setattr(
        "penstock.families.transformers_model.find_spec",
        lambda name: None if name == "transformers" else find(name),
    )
    result = run_command("plan", str(folder))
    assert result.returncode == 2 and "pip install 'penstock[transformers]'" in result.stderr


@pytest.mark.rare
def test_it_runs_in_a_process_of_its_own(run_command: RunCommand, folder: Path) -> None:
    result = run_command("run", str(folder), "hello", "--max-tokens", "4", "--kv-cache-memory", "64MB")
    assert result.returncode == 0 and result.stdout.strip() and "slower" in result.stderr
