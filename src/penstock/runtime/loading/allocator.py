"""Settings of the C library's allocator that suit the memory use of a step."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_MAX_MMAP_THRESHOLD = 32 << 20  # the largest that glibc accepts
KEPT_BYTES = 256 << 20  # freed bytes that are kept for the next step


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next step instead of returning it to the kernel.

    Torch allocates every intermediate tensor anew. With glibc's defaults, tensors above 128 KiB cost a page fault per
    4 KiB: six times the cost of an RMSNorm of 256 tokens. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
