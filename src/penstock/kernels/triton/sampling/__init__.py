"""Triton kernels that choose tokens and score them."""
