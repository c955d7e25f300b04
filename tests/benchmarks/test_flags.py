"""Flags of the scripts that time ops: a mistake is one clear line."""

import sys

import pytest
import step as step_script
from results import run_command

import kernels as kernels_script
from penstock.config.machine.gpu import with_gpu
from penstock.prepare import model
from tests.cli.test_device import H200, machine

COMMANDS = {"step": step_script.step, "kernels": kernels_script.kernels}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("step", "--context", "99999"), ("--context 99999", "at most 8192")),
        (("step", "--rows", "1,0"), ("--rows", "1,0")),
        (("kernels", "--ops", "linear,convolution"), ("--ops", "convolution", "linear", "attention")),
        (("kernels", "--isa", "mmx"), ("--isa", "mmx")),
        (("kernels", "--threads", "9999"), ("--threads 9999", "cores")),
    ],
)
def test_a_mistake_is_one_clear_line(
    arguments: tuple[str, ...],
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    script, *flags = arguments
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *flags])
    with pytest.raises(SystemExit) as end:
        run_command(COMMANDS[script])
    said = capfd.readouterr().err
    assert end.value.code == 2
    assert said.startswith(f"{script}.py: ") and said.count("\n") == 1
    for word in words:
        assert word in said


def test_ops_are_timed_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "detect_device", lambda asked: with_gpu(machine(), H200))
    with pytest.raises(ValueError, match=r"--device is cuda, but this times .* set --device cpu"):
        step_script.step.__wrapped__(rows="1", context=16, steps=2, flags={})  # type: ignore[attr-defined]
