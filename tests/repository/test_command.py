"""`penstock repository` and `penstock bench serve --wire kserve` against a running server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.bench.commands import Load, online
from tests.e2e.server import serving
from tests.patience import PATIENCE
from tests.repository import onnx_files as files
from tests.repository.onnx_files import put

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")


def test_status_load_unload_and_bench(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, "doubled", files.scale(2))
    put(root, "broken", b"no model")
    with serving(tmp_path / "log", "--repository", str(root), "--state-dir", "none", model=None) as server:

        def command(*arguments: str) -> subprocess.CompletedProcess[str]:
            made = [sys.executable, "-m", "penstock", *arguments, "--url", server.url]
            return subprocess.run(made, capture_output=True, text=True, timeout=PATIENCE)

        shown = command("repository").stdout
        assert "doubled" in shown and "ready" in shown and "unavailable" in shown
        assert command("repository", "unload", "doubled").stdout == "doubled is unloaded\n"
        refused = command("repository", "load", "broken")
        assert refused.returncode == 1 and "load failed for model 'broken'" in refused.stderr
        assert command("repository", "load", "doubled").returncode == 0
        assert "takes the name of a model" in command("repository", "load").stderr

        load, figures = Load(20, "8", "4", 0, 100, None, 1.0, 4, None, 0), tmp_path / "figures.json"
        online(server.url, "doubled", None, load, str(figures), "kserve")
        found = json.loads(figures.read_text())
        assert (found["requests"], found["failed"]) == (20, 0) and found["e2e_ms_p99"] >= found["e2e_ms_p50"] > 0
        assert "ttft_ms_p50" not in found and found["requests_s"] > 0
        with pytest.raises(ValueError, match=r"^--model is 'nowhere': Request for unknown model: model 'nowhere'"):
            online(server.url, "nowhere", None, load, None, "kserve")
