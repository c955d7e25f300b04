"""Tests. Where there is no GPU, Triton's kernels are interpreted: triton asks when it is imported, by whomever."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
