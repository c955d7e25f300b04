"""Keys of the prefix cache: a chain of SHA-256, one link per full block of tokens.

Equal keys mean equal KV: a block's key covers every token before it, and the root of the chain covers everything else
that the KV depends on. No key is truncated, and every field is encoded with its type and length.
"""

import struct
from collections.abc import Sequence as Items
from hashlib import sha256

import msgspec

from penstock.messages import GenerateRequest


class PrefixHasher:
    """Extends chains of keys for one block size."""

    def __init__(self, block_size: int, cache_root: str) -> None:
        self._block_size = block_size
        self._cache_root = cache_root
        self._pack = struct.Struct(f"<{block_size}I").pack

    def root(self, request: GenerateRequest) -> bytes:
        """Return the first link of the request's keys: executor, revision and salt."""
        fields = (self._cache_root, request.model_revision, request.cache_salt)
        return sha256(msgspec.msgpack.encode(("penstock.kv", 1, self._block_size, *fields))).digest()

    def extend(self, keys: list[bytes], root: bytes, tokens: Items[int], count: int) -> None:
        """Append keys until there are `count`. Needs count * block_size tokens, each in 0 .. 2**32 - 1."""
        size = self._block_size
        key = keys[-1] if keys else root
        for start in range(len(keys) * size, count * size, size):
            key = sha256(key + self._pack(*tokens[start : start + size])).digest()
            keys.append(key)
