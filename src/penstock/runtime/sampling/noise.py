"""Counter-based noise: a function of (seed, choice, i, token id), with no state to carry, save or restore.

The algorithm, which the C++ and Triton kernels repeat (uint64 and uint32 arithmetic wraps):

    mix64(z):    z ^= z >> 30;  z *= 0xbf58476d1ce4e5b9;  z ^= z >> 27;  z *= 0x94d049bb133111eb;  z ^= z >> 31
    at(z, n):    mix64(z + (n + 1) * 0x9e3779b97f4a7c15)            the n-th output of splitmix64 started at z
    key:         at(at(at(seed, 0), choice), i)                     i counts the outputs the choice already has
    k0, k1:      the key's low and its high 32 bits
    hash(token): x = token ^ k0
                 x ^= x >> 17;  x *= 0xed5ad4bb;  x ^= k1
                 x ^= x >> 11;  x *= 0xac4c1b51
                 x ^= x >> 15;  x *= 0x31848bab
                 x ^= x >> 14
    gumbel:      -log(-log1p(-(hash + 0.5) / 2**32))                in float64

A choice's next token is the argmax of log p + gumbel over the tokens its filters keep: a draw from p (the Gumbel-max
trick, Yellott 1977). A *small* hash is good luck, so that the fine resolution of floating point near zero lies where
winners are: u = (hash + 0.5) / 2**32 is exact in float64 and never 0 or 1. The hash is a bijection of 32 bits, so no
two tokens of a row draw the same noise. Its constants are triple32's (C. Wellons, "Prospecting for hash functions");
splitmix64's are Steele, Lea and Flood's (2014).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_HASH = 0xFFFFFFFF

_MASK64 = 0xFFFFFFFFFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15

Hashes = NDArray[np.uint32]
Keys = NDArray[np.uint64]


def stream(seed: int, choice: int) -> int:
    """The part of the key that is the same for every token of a choice: at(at(seed, 0), choice)."""
    return _at(_at(seed & _MASK64, 0), choice)


def keys(streams: Keys, index: NDArray[np.integer[Any]]) -> Keys:
    """at(stream, i) for every row: uint64 [rows]."""
    z = streams + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def hash_tokens(token_ids: NDArray[np.integer[Any]], key: Keys) -> Hashes:
    """hash(token) of token ids [rows, n] or [n] under each row's key [rows]: uint32 [rows, n]."""
    k0 = (key & np.uint64(MAX_HASH)).astype(np.uint32)[:, None]
    k1 = (key >> np.uint64(32)).astype(np.uint32)[:, None]
    x = token_ids.astype(np.uint32) ^ k0
    x ^= x >> np.uint32(17)
    x *= np.uint32(0xED5AD4BB)
    x ^= k1
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return x


def gumbel(hashes: Hashes) -> NDArray[np.float64]:
    """Standard Gumbel noise, decreasing in the hash, from -3.13 to 22.88."""
    u = (hashes + 0.5) * 2.0**-32
    noise: NDArray[np.float64] = -np.log(-np.log1p(-u))
    return noise


def _at(z: int, n: int) -> int:
    z = (z + (n + 1) * _GOLDEN) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
