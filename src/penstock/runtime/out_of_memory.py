"""Recognises failed allocations."""

import torch

_CPU_ALLOCATOR = (
    "DefaultCPUAllocator: "  # begins torch's message, whose type is RuntimeError, behind where it was raised
)


def is_out_of_memory(error: BaseException) -> bool:
    """True for a failed allocation of Python, NumPy, torch or the native kernels, on the host or a GPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )
