"""Timing of single ops of the native kernels: kernels.py, step.py, moe.py and long_context.py use it."""
