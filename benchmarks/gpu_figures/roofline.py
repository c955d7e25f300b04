"""The peak rates of a GPU from which rooflines are computed."""

import msgspec


class Peaks(msgspec.Struct, frozen=True):
    """Peak rates of a GPU."""

    bandwidth: float  # bytes a second, read and written
    bf16_flops: float  # multiply-adds counted twice, a second
    fp8_flops: float


# One H200: a large copy, and the best products of random matrices in its libraries.
H200 = Peaks(4.3e12, 0.79e15, 1.58e15)
