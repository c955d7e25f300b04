"""Which device a command computes on, and what it says where there is no such one."""

import subprocess
import sys

import pytest
from msgspec import structs

from penstock.config import ConfigError
from penstock.config.machine.gpu import Gpu, with_gpu
from penstock.prepare import device
from penstock.prepare.checks import check_runs
from tests.cli.test_help import penstock
from tests.config.models import GIB, machine
from tests.config.test_gpu import on

H200 = Gpu(name="NVIDIA H200", memory=140 * GIB, capability="9.0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, and a torch built for it."""
    monkeypatch.setattr(device, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(device, "detect_gpu", lambda: H200)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("asked", "found"), [(None, "cuda"), ("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_auto_takes_the_gpu_where_there_is_one(asked: str | None, found: str) -> None:
    hardware = device.detect_device(asked)
    assert hardware.device == found
    assert (hardware.memory_total == 140 * GIB) == (found == "cuda")


@pytest.mark.usefixtures("gpu")
def test_a_torch_for_cpus_does_not_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "torch_has_cuda", lambda: False)
    assert device.detect_device("auto").device == "cpu"


def test_without_a_gpu_it_says_what_torch_says_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "detect_gpu", lambda: None)
    assert device.detect_device(None).device == "cpu"
    with pytest.raises(ConfigError, match=r"--device is cuda, but torch finds no GPU: .*; set --device cpu, or"):
        device.detect_device("cuda")


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_is_too_old_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "detect_gpu", lambda: structs.replace(H200, name="Tesla T4", capability="7.5"))
    assert device.detect_device("auto").device == "cpu"
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5 and .* 8\.0 .* set --device cpu"):
        device.detect_device("cuda")


def test_auto_imports_no_torch() -> None:
    script = "import sys; from penstock.prepare.device import detect_device; detect_device('auto'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in loaded


def test_a_gpu_that_is_not_there_is_one_clear_line() -> None:
    """Of both commands, one after the other in one process."""
    code = (
        "import sys; from penstock.cli.main import main\n"
        "for command in ('serve', 'run'):\n"
        "    sys.argv = ['penstock', command, '--device', 'cuda']\n"
        "    try: main()\n"
        "    except SystemExit as end: print(end.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"CUDA_VISIBLE_DEVICES": ""},  # where there is one it is hidden
    )
    assert done.stdout.split() == ["2", "2"] and "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("penstock: --device is cuda, but torch finds no GPU: ")


def test_a_wrong_combination_is_one_clear_line() -> None:
    done = penstock("serve", "--device", "cpu", "--quantization", "fp8")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "--quantization (command line) is fp8" in done.stderr and "set --quantization int8" in done.stderr


def test_each_rank_needs_a_gpu_where_nobody_else_places_it() -> None:
    tensor, both = {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    one, two = (with_gpu(machine(), structs.replace(H200, count=count)) for count in (1, 2))
    with pytest.raises(
        ConfigError, match=r"2 ranks of this machine need a GPU each, and it has 1: set a smaller --tens"
    ):
        check_runs(on(H200, **tensor), one)
    with pytest.raises(ConfigError, match=r"4 ranks of this machine need a GPU each, and it has 2"):
        check_runs(on(H200, **both), two)
    check_runs(on(H200), one)
    check_runs(on(H200, **tensor), two)
    check_runs(on(H200, **both, distributed_executor="ray"), one)
