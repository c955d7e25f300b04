"""Checkpoints that the tools themselves wrote: their values are read to the last bit, and their logits follow.

`benchmarks/quantised_oracles.py --keep` wrote the folders in `written`, with the tools' own dequantised weights as
digests, and logits that transformers computed with these weights.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from penstock.families import load_spec
from penstock.kernels import Platform
from penstock.weights.checkpoint import stored_tensors
from penstock.weights.load import load_parameters
from tests.models.logits import FP32_ATOL, FP32_RTOL, kernels_on, logits_of

WRITTEN = Path(__file__).parent / "written"
TOKENS = list(range(3, 63, 4))
FLOATS = ("F32", "BF16", "F16")


def coded_matrices(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Each quantised matrix of a checkpoint by its name, as fp32."""
    spec = load_spec(folder)
    types = {name: tensor.dtype for name, tensor in stored_tensors(folder, spec).items()}
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    for parameter in spec.parameters:
        for source in parameter.sources:
            if len(parameter.shape) == 2 and types[source.name] not in FLOATS:
                yield source.name, parameters[parameter.name][source.start : source.start + source.rows]


def digest(tensor: Tensor) -> str:
    """Of the bits of all values, whatever the sign of zeros is."""
    return hashlib.sha256((tensor + 0).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("kind", sorted(path.name for path in WRITTEN.iterdir()))
def test_values_and_logits_are_those_of_the_tool(kind: str) -> None:
    folder = WRITTEN / kind
    with safe_open(folder / "expected.safetensors", "pt") as file:
        expected, logits = file.metadata(), file.get_tensor("logits")
    dtype = getattr(torch, expected["dtype"])
    digests = json.loads(expected["values"])  # none for bitsandbytes' int8, which multiplies in another order
    assert len(digests) == (0 if kind == "int8" else 16 if "moe" in kind else 14)
    assert {name: digest(ours.to(dtype)) for name, ours in coded_matrices(folder) if name in digests} == digests
    spec = load_spec(folder)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    rounded = {name: each.to(dtype).float() for name, each in parameters.items()}  # as the tool has them
    (ours,) = logits_of(spec, rounded, kernels_on(Platform("cpu", "AVX2"), spec), [TOKENS])
    torch.testing.assert_close(ours, logits, rtol=FP32_RTOL, atol=FP32_ATOL)
