"""`penstock repository` against a running server."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import serving
from tests.patience import PATIENCE
from tests.repository import onnx_files as files
from tests.repository.onnx_files import put

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")


def test_status_load_and_unload(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, "doubled", files.scale(2))
    put(root, "broken", b"no model")
    with serving(tmp_path / "log", "--repository", str(root), "--state-dir", "none", model=None) as server:

        def command(*arguments: str) -> subprocess.CompletedProcess[str]:
            made = [sys.executable, "-m", "penstock", "repository", *arguments, "--url", server.url]
            return subprocess.run(made, capture_output=True, text=True, timeout=PATIENCE)

        shown = command().stdout
        assert "doubled" in shown and "ready" in shown and "unavailable" in shown
        assert command("unload", "doubled").stdout == "doubled is unloaded\n"
        refused = command("load", "broken")
        assert refused.returncode == 1 and "load failed for model 'broken'" in refused.stderr
        assert command("load", "doubled").returncode == 0
        assert "takes the name of a model" in command("load").stderr
