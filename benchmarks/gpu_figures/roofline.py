"""What a GPU can do at most, as rooflines are drawn."""

import msgspec


class Peaks(msgspec.Struct, frozen=True):
    bandwidth: float  # bytes a second, read and written
    bf16_flops: float  # multiply-adds counted twice, a second
    fp8_flops: float


# One H200: a large copy, and the best products of random matrices that its library has.
H200 = Peaks(4.3e12, 0.79e15, 1.58e15)
