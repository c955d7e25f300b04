"""Sampling: logits to tokens, for a whole batch at once, each row as if it were alone.

`reference.py` defines the tokens. The native and the Triton kernels choose the same ones.
"""
