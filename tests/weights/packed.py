"""Weights of a checkpoint as tensors, packed for a CPU, or packed for a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.families import ModelSpec
from penstock.kernels import Needs, Platform, detect_platform, select_packing
from penstock.weights.load import load_parameters

needs_native = pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
NATIVE = pytest.param("packed", marks=needs_native, id="packed")
DEVICE = pytest.param("device", marks=needs_native, id="device")
HERE = torch.device("cpu")  # in place of a GPU


def load_fp32(path: Path, spec: ModelSpec, packed: str = "", **options: Any) -> dict[str, Any]:
    """Packed for a CPU, for a device, or "" for tensors."""
    if packed == "device":
        packing = select_packing(Platform("cuda", "9.0"), Needs(torch.float32), device=HERE)
        return load_parameters(path, spec, torch.float32, packing=packing, device=HERE, **options)
    # Of the sets whose formats hold all codes without loss.
    packing = select_packing(Platform("cpu", "AVX2", "avx2"), Needs(torch.float32)) if packed else None
    return load_parameters(path, spec, torch.float32, packing=packing, **options)
