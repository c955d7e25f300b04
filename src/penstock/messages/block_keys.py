"""Keys of the prefix cache: a chain of SHA-256 hashes, one for each full block of tokens.

A block's key covers its own tokens and all tokens before it. The root of the chain covers the block size, the weights
and the salt. So an engine and a router compute the same keys, and the router can look up which engine has the blocks of
a prompt. The other things that a block's content depends on are not in the keys but in `Identity.numerics`: pages may
be exchanged only between engines with equal numerics. No hash is truncated, and every field is encoded with its type
and length.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256

import msgspec

TOKEN_BYTES = 4  # of a packed id


class BlockKeys:
    """Computes the keys for one block size and one model."""

    def __init__(self, block_size: int, weights: str) -> None:
        """`weights` is the digest in `Identity.weights`."""
        self._block_size = block_size
        self._weights = weights
        self._pack = struct.Struct(f"<{block_size}I").pack
        self._block_bytes = block_size * TOKEN_BYTES

    def root(self, salt: str) -> bytes:
        """Return the root of the chain for requests with this salt."""
        return sha256(msgspec.msgpack.encode(("penstock.kv", 2, self._block_size, self._weights, salt))).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: Sequence[int], count: int) -> None:
        """Append to `keys` until it has `count` keys. `tokens` must have count * block_size ids in 0 .. 2**32 - 1."""
        size = self._block_size
        if count - len(keys) == 1:  # as nearly always: a sequence grows by a token at a time
            self.extend_packed(keys, root, self._pack(*tokens[(count - 1) * size : count * size]))
        else:
            self.extend_packed(keys, root, packed(tokens[len(keys) * size : count * size]))

    def extend_packed(self, keys: list[bytes], root: bytes, tokens: bytes) -> None:
        """Append the keys of the blocks that follow. `tokens` are theirs, as `packed` makes them; those of a last block
        that is not full are left out."""
        size = self._block_bytes
        key = keys[-1] if keys else root
        for end in range(size, len(tokens) + 1, size):
            key = sha256(key + tokens[end - size : end]).digest()
            keys.append(key)


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian words."""
    return struct.pack(f"<{len(tokens)}I", *tokens)
