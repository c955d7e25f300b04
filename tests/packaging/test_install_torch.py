"""`make install` on a machine without an NVIDIA GPU takes PyTorch's build for CPUs, if its index can be reached."""

import http.server
import importlib.util
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.patience import AT_ONCE

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install_torch", ROOT / "scripts" / "install_torch.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = _script()


class _Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/cpu/torch/" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/cpu"
        server.shutdown()


class _Pip:
    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(command)
        return self.status


def test_without_a_gpu_the_build_for_cpus_is_installed(index: str, capsys: pytest.CaptureFixture[str]) -> None:
    pip = _Pip()
    assert script.install(index, gpu=False, run=pip) == "PyTorch: the build for CPUs"
    [command] = pip.commands
    assert list(command[-6:]) == ["-c", "constraints.txt", "--no-deps", "--index-url", index, "torch"]
    assert "about 0.2 GB" in capsys.readouterr().out  # before the download, not after it


def test_a_trailing_slash_of_the_index_changes_nothing(index: str) -> None:
    assert script.answers(index + "/")


@pytest.mark.parametrize(("gpu", "path"), [(True, ""), (False, "/elsewhere")], ids=["a GPU", "no page for torch"])
def test_pip_chooses_as_before(index: str, gpu: bool, path: str) -> None:
    pip = _Pip()
    assert "about 3 GB" in script.install(index + path, gpu=gpu, run=pip)
    assert pip.commands == []


@pytest.mark.parametrize("given", ["", "no address", "http://127.0.0.1:9/cpu"])
def test_no_index_leaves_the_choice_to_pip(given: str) -> None:
    pip = _Pip()
    assert "TORCH_INDEX" in script.install(given, gpu=False, run=pip)
    assert pip.commands == []


def test_an_index_without_a_build_for_this_machine_leaves_the_choice_to_pip(index: str) -> None:
    assert "pip chooses the build" in script.install(index, gpu=False, run=_Pip(status=1))


def test_a_silent_index_delays_the_installation_by_three_seconds_at_most() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert not script.answers(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
        assert time.monotonic() - began < AT_ONCE
    assert script.PROBE_SECONDS == 3


def test_a_gpu_is_found_by_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    assert not script.has_nvidia_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert script.has_nvidia_gpu(tmp_path)


def test_a_gpu_is_found_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.has_nvidia_gpu(tmp_path / "empty")
    program.write_text("#!/bin/sh\nexit 9\n")  # a driver's program without a driver
    assert not script.has_nvidia_gpu(tmp_path / "empty")


def test_make_serve_says_how_to_embed() -> None:
    done = subprocess.run(["make", "-n", "-o", "install", "serve"], cwd=ROOT, capture_output=True, text=True)
    assert "make serve ARGS='all-minilm-l6-v2 --truncate-embeddings --port 8001'" in done.stdout, done.stderr


def test_make_runs_it_with_the_address_that_pytorch_org_names() -> None:
    for target in (".venv/.installed", ".venv/.installed-dev"):
        command = ["make", "-nB", f"PYTHON={sys.executable}", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        line = 'scripts/install_torch.py "https://download.pytorch.org/whl/cpu"'
        assert line in done.stdout and done.stdout.index(line) < done.stdout.index(" -e "), done.stderr
