"""Raises the errors of what needs the native kernels, if they were not built or do not support a model. No torch is
imported."""

from collections.abc import Iterable


def unsupported_quantization(quantization: str, dtype: str, *, built: bool) -> str:
    """Returns the error for weights that only the native kernels quantise. `built`: they exist, but not for `dtype`."""
    why = (
        f"do not compute in {dtype}; set --dtype bfloat16"
        if built
        else "were not built: they need an x86-64 processor with AVX2, and a C++ compiler when penstock is installed; "
        "provide these"
    )
    return f"--quantization {quantization} needs the native kernels, which {why}, or set --quantization none"


def has_whole_lines(block_size: int, head_dims: Iterable[int]) -> bool:
    """True if native attention, which reads whole cache lines, supports pages of these sizes."""
    return block_size % 16 == 0 and all(dim % 16 == 0 for dim in head_dims)


def unsupported_int8_pages(block_size: int, head_dims: Iterable[int]) -> str:
    """Returns the error for an int8 KV cache that no attention here reads."""
    return (
        "--kv-cache-dtype int8 needs the native kernels (an x86-64 processor with AVX2, and a C++ compiler when "
        f"penstock is installed), and a block size ({block_size}) and head sizes "
        f"({', '.join(map(str, sorted(set(head_dims))))}) that are multiples of 16; leave it at auto"
    )
