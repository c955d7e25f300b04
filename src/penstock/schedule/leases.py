"""KV blocks that a tier beside the scheduler holds, to copy them to a disk or to fill them from there."""

import struct
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.messages import GenerateRequest
from penstock.schedule.cache import KVCache
from penstock.schedule.log import Event, Imported, Lent, Reserved, Returned

SPARE_BLOCKS = 8  # blocks that a lease leaves to the running sequences


class BlockLeases:
    """The blocks of a cache with one KV group that are leased now.

    A leased block is held, as if a sequence had it in its table, so it is not evicted while a thread reads or fills
    it. Each verb is an event of the scheduler's log, since it decides which blocks later plans get.
    """

    def __init__(self, cache: KVCache, record: Callable[[Event], None]) -> None:
        self._cache = cache
        self._pool = cache.pools[0]
        self._record = record
        self.held: Counter[int] = Counter()  # leases of each block

    def keys(self, request: GenerateRequest) -> list[bytes]:
        """Return the keys of a request's full blocks: of its prompt, and of the output that it brings."""
        tokens = [*request.prompt_ids, *request.output_ids]
        keys: list[bytes] = []
        root = self._cache.keys.root(request.cache_salt)
        try:
            self._cache.keys.extend(keys, root, tokens, len(tokens) // self._cache.block_size)
        except struct.error:
            return []  # token ids that no model has: the scheduler refuses the request
        return keys

    def cached(self, key: bytes) -> bool:
        """Return whether a block is published under this key."""
        return self._pool.match(key) is not None

    def retired(self) -> list[bytes]:
        """Return the keys of blocks that no sequence holds since the last call, the first blocks of a sequence before
        the later ones. The first call returns none."""
        return self._pool.retired()[::-1]

    @property
    def total(self) -> int:
        """The number of blocks, leased or not."""
        return self._pool.total

    @property
    def spare(self) -> bool:
        """Whether there is a block that the running sequences are not likely to need soon."""
        return self._pool.available > SPARE_BLOCKS

    def lend(self, keys: Sequence[bytes]) -> list[int]:
        """Lease the blocks published under `keys`. Keys without a block are left out."""
        blocks = [block for key in keys if (block := self._pool.match(key)) is not None]
        if blocks:
            self._record(Lent(tuple(keys)))
            for block in blocks:
                self._pool.share(block)
            self.held.update(blocks)
        return blocks

    def reserve(self) -> int:
        """Lease a block to be filled. The caller has checked `spare`."""
        self._record(Reserved())
        (block,) = self._pool.allocate(1)
        self.held[block] += 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Let sequences share a block that was reserved and is filled now. No effect if the key has a block."""
        self._record(Imported(block, key))
        self._pool.publish(block, key)

    def give_back(self, blocks: Sequence[int]) -> None:
        """End one lease of each block, in this order: it is the order of eviction."""
        if blocks:
            self._record(Returned(tuple(blocks)))
            self._pool.free(blocks, self._cache.fence)
            self.held -= Counter(blocks)
