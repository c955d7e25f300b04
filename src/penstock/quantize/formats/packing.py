"""Codes of less than a byte, packed one behind the other in words of 32 bits."""

import numpy as np
from numpy.typing import NDArray


def packed_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Returns codes [rows, count] as words [rows, words]: each row is a stream of bits, the lowest first. A row that
    ends within a word is filled up with zeros."""
    rows, count = codes.shape
    words = -(-count * bits // 32)
    stream = np.zeros((rows, words * 32), np.uint8)
    each = (codes[:, :, None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream[:, : count * bits] = each.reshape(rows, -1)
    return np.packbits(stream, axis=1, bitorder="little").view("<i4")
