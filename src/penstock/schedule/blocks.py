"""The blocks of one KV group: their holders, their content, and when they may be allocated again.

A block is in exactly one of four states:

- held: some sequence's table names it (reference count above 0), published or not;
- fenced: no sequence holds it, but a plan submitted before it was freed is still outstanding and may touch it;
- cached: no sequence holds it, it is published under a key and is kept until evicted, the least recently freed first;
- free: no sequence holds it and its content means nothing.

A pool may be made smaller while it is used: blocks from a limit on are then not allocated again. The free block with
the lowest id is allocated first, so that the memory of high ones can be given back.

Block 0 is the null page: never handed out, it stands in tables for blocks that are never read.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.size = self.limit = num_blocks  # blocks below the limit may be allocated
        self.held = 0
        self.reusable = 0  # not held, and their content can be matched
        self.fenced = 0
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free = list(range(1, num_blocks))  # a heap
        self._evictable: OrderedDict[int, None] = OrderedDict()
        # A fenced block's own fence is in `_fences`; an entry of the queue that disagrees is of an earlier life.
        self._fences = [0] * num_blocks
        self._fence_queue: deque[tuple[int, int]] = deque()
        self._changed: dict[bytes, bool] | None = None  # since the last `changes`: keys, and whether they are published
        self._retired: list[bytes] | None = None  # keys since the last `retired`, in the order of their retirement

    @property
    def total(self) -> int:
        """Blocks that may be allocated at a time."""
        return max(self.limit - 1, 0)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    def match(self, key: bytes) -> int | None:
        """The block published under `key`."""
        return self._index.get(key)

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` count as available and would no longer once shared."""
        return sum(block in self._evictable for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked `available`."""
        blocks = []
        for _ in range(count):
            block = heappop(self._free) if self._free else self.evict()
            self._refs[block] = 1
            blocks.append(block)
        self.held += count
        return blocks

    def share(self, block: int) -> None:
        """Add a reference to a block that is held, cached, or fenced with its content."""
        if not self._refs[block]:
            self.held += 1
            self.reusable -= 1
            if self._fences[block]:
                self._fences[block] = 0
                self.fenced -= 1
            else:
                del self._evictable[block]
        self._refs[block] += 1

    def free(self, blocks: Iterable[int], fence: int) -> None:
        """Drop a reference each. Those held no longer wait until plan `fence` has been applied (0: no plan is out)."""
        for block in blocks:
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            self.held -= 1
            if self._keys[block] is not None:
                self.reusable += 1
            if fence:
                self._fences[block] = fence
                self._fence_queue.append((fence, block))
                self.fenced += 1
            else:
                self._retire(block)

    def release(self, applied: int) -> None:
        """Lift the fences of plans up to `applied`."""
        queue = self._fence_queue
        while queue and queue[0][0] <= applied:
            fence, block = queue.popleft()
            if self._fences[block] == fence:
                self._fences[block] = 0
                self.fenced -= 1
                self._retire(block)

    def publish(self, block: int, key: bytes) -> None:
        """Let a held, full block be matched. The first block published under a key stays the one."""
        if self._keys[block] is None and key not in self._index:
            self._keys[block] = key
            self._index[key] = block
            if self._changed is not None:
                self._changed[key] = True

    def evict(self) -> int:
        """Forget the content of the cached block freed longest ago, and take the block."""
        block, _ = self._evictable.popitem(last=False)
        self._unpublish(block)
        self.reusable -= 1
        return block

    def forget(self) -> None:
        """Unpublish everything. Blocks that are held or fenced stay so."""
        for block in list(self._index.values()):
            self._unpublish(block)
        self._free.extend(self._evictable)
        heapify(self._free)
        self._evictable.clear()
        self.reusable = 0

    def resize(self, limit: int) -> None:
        """Let only blocks below `limit` be allocated from now on. Others lose their content at once; the caller frees
        those that are held."""
        before, self.limit = self.limit, limit
        for block in range(limit, before):
            if self._keys[block] is not None:
                self._unpublish(block)
                self.reusable -= not self._refs[block]
                self._evictable.pop(block, None)
        self._free = [block for block in self._free if block < limit]
        self._free += [block for block in range(before, limit) if not self._refs[block] and not self._fences[block]]
        heapify(self._free)

    def watch(self) -> None:
        """Let `changes` begin with all keys that are published now."""
        self._changed = dict.fromkeys(self._index, True)

    def changes(self) -> dict[bytes, bool]:
        """The keys published or unpublished since the last call, and whether they are published. Nothing without
        `watch`."""
        changed = self._changed
        if not changed:
            return {}
        self._changed = {}
        return changed

    def retired(self) -> list[bytes]:
        """The keys of blocks that have become cached since the last call. The first call returns none, and begins to
        note them."""
        retired, self._retired = self._retired or [], []
        return retired

    def _retire(self, block: int) -> None:
        if block >= self.limit:
            return
        key = self._keys[block]
        if key is None:
            heappush(self._free, block)
            return
        self._evictable[block] = None
        if self._retired is not None:
            self._retired.append(key)

    def _unpublish(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._index[key]
            self._keys[block] = None
            if self._changed is not None:
                self._changed[key] = False
