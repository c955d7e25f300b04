"""Kernels for NVIDIA GPUs, in Triton (see docs/gpu.md). These modules are imported only when a provider is made."""
