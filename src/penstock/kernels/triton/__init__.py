"""Kernels for NVIDIA GPUs, in Triton (see docs/gpu.md). Only what a provider's maker imports may import triton."""
