"""The engine room itself needs no torch: a server's own process never loads it."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["penstock.engine", "penstock.engine.process"])
def test_torch_is_not_imported(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_torch_without_what_no_engine_uses() -> None:
    code = """
import sys
from penstock.runtime.loading.quick_torch import UNUSED, import_torch
import_torch()
import torch
assert not set(UNUSED) & set(sys.modules), "the import was not shortened"
assert not hasattr(torch, "export")
import torch.export, torch._meta_registrations
module = torch.nn.Linear(2, 3)
program = torch.export.export(module, (torch.ones(1, 2),))
assert torch.equal(program.module()(torch.ones(1, 2)), module(torch.ones(1, 2)))
assert torch.linalg.svd(torch.empty(4, 3, device="meta"), full_matrices=False)[0].shape == (4, 3)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
