"""The engine room itself needs no torch: a server's own process never loads it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["penstock.engine", "penstock.engine.process"])
def test_torch_is_not_imported(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
