"""Triton kernels that sample tokens and compute logprobs."""
