"""Keys of the prefix cache: a chain of SHA-256, one link per full block of tokens.

A block's key covers every token before it, and the root of the chain covers the block size, the weights and the salt.
Whoever knows these can compute the keys: an engine, and a router that asks which engine has the blocks of a prompt.
What else a block's content depends on is not in the keys but in `Identity.numerics`: pages may only be exchanged
between engines whose numerics are equal. No key is truncated, and every field is encoded with its type and length.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

import msgspec


class BlockKeys:
    """Makes the chains of keys for one block size and one model."""

    def __init__(self, block_size: int, weights: str) -> None:
        """`weights` is the model's digest, see `Identity`."""
        self._block_size = block_size
        self._weights = weights
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, salt: str) -> bytes:
        """Return the first link of the keys of requests with this salt."""
        return sha256(msgspec.msgpack.encode(("penstock.kv", 2, self._block_size, self._weights, salt))).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: Sequence[int], count: int) -> None:
        """Append keys until there are `count`. Needs count * block_size tokens, each in 0 .. 2**32 - 1."""
        size = self._block_size
        key = keys[-1] if keys else root
        for start in range(len(keys) * size, count * size, size):
            key = sha256(key + self._pack(*tokens[start : start + size])).digest()
            keys.append(key)
