"""Every kernel compiles for a Hopper GPU, and fits it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.kernels.triton.tiles import precision

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 * 1024  # that a block can have
STACK_BYTES = 64  # of a thread: a sine of a large angle takes 32, and a few scalars may wait there, but no tile
FP32_STACK_BYTES = 256  # a tile of fp32 is three of tensor cores', and little of them may
ON_TENSOR_CORES = {"attend", "_dense", "_eight_bits", "_coded", "_grouped", "_grouped_codes"}


@pytest.mark.long
@pytest.mark.parametrize("sizes", ["few", pytest.param("all", marks=pytest.mark.rare)])
def test_kernels_compile_for_a_gpu_and_fit_it(sizes: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.kernels.triton.hopper", sizes]
    said = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert said.returncode == 0, said.stderr
    compiled = [json.loads(line) for line in said.stdout.splitlines()]
    assert ON_TENSOR_CORES.issubset(each["kernel"] for each in compiled)
    for each in compiled:
        stack = FP32_STACK_BYTES if each["constants"].get("PRECISION") == precision(torch.float32) else STACK_BYTES
        assert each["shared"] <= SHARED_BYTES and each["stack"] <= stack, each
        if each["kernel"] in ON_TENSOR_CORES:
            assert each["tensor_cores"] and each["asynchronous"], each
