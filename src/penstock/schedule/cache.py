"""The KV cache as sequences see it: one block table per KV group, all of the same length.

A full-attention group keeps every block of a sequence. A group with a window frees the blocks that no later token sees;
its table keeps its length, with the null block 0 in their place. A prefix match is a number of tokens after which every
group has all the blocks that the next token sees.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from penstock.messages import BlockChanges, BlockCopy, BlockKeys, Capacity, Window
from penstock.schedule.blocks import BlockPool
from penstock.schedule.sequence import Phase, Sequence


class Hit(NamedTuple):
    """The first `computed` tokens of a sequence, whose KV lies in existing blocks. The sequence shares the full blocks.
    If `computed` ends inside a block, that block is its tail: the sequence gets a copy, since it will write into it."""

    computed: int
    shared: tuple[list[int], ...]  # per group: ids of the full blocks, 0 for those never read
    tails: tuple[int, ...] = ()  # per group: id of the block to copy; empty if `computed` ends at a block's border


class KVCache:
    """All KV groups of one executor."""

    def __init__(self, capacity: Capacity, enable_prefix_caching: bool) -> None:
        self.block_size = capacity.block_size
        self.windows = tuple(group.window for group in capacity.groups)
        self._limited = [(g, window) for g, window in enumerate(self.windows) if window]
        self.pools = tuple(BlockPool(group.num_blocks) for group in capacity.groups)
        self.blocks_total = self._totals()  # of each group, that may be allocated at a time
        self.keys = BlockKeys(capacity.block_size, capacity.identity.weights)
        self._shares = capacity.keeps == "blocks"
        self._caching = enable_prefix_caching and self._shares
        whole = (pool for pool, window in zip(self.pools, self.windows, strict=True) if not window)
        self._watched = next(whole, self.pools[0])
        self._reports = -1  # the number of reports since `watch`; -1 before it
        self._fence = 0  # the newest outstanding plan, 0 when there is none: blocks freed now are fenced until its end

    # -- outstanding plans ------------------------------------------------------------------------------------

    def submitted(self, plan_id: int) -> None:
        """Note that a plan is outstanding."""
        self._fence = plan_id

    def applied(self, plan_id: int, copied: Iterable[tuple[int, ...]]) -> None:
        """Release the blocks that were fenced until the end of plan `plan_id`, and free the tails that it copied."""
        if self._fence == plan_id:
            self._fence = 0
        for pool in self.pools:
            if pool.fenced:
                pool.release(plan_id)
        for tails in copied:
            for pool, tail in zip(self.pools, tails, strict=True):
                pool.free((tail,), self._fence)

    @property
    def fence(self) -> int:
        """The newest outstanding plan; 0 when there is none."""
        return self._fence

    # -- where a sequence can start ---------------------------------------------------------------------------

    def find(self, sequence: Sequence, spare: int) -> Hit | None:
        """Return the longest hit with which the blocks of all known tokens fit now, with `spare` blocks left. None if
        they do not fit."""
        for copying in (True, False):
            hit = self._longest_hit(sequence, copying)
            if self._fits(sequence, hit, spare):
                return hit
            if not hit.tails:
                break
            # The tail and its copy are two blocks: without the copy, one block less is needed.
        return None

    def start(self, sequence: Sequence, hit: Hit) -> None:
        """Give the sequence the hit's shared blocks. Hold the tails until the plan that copies them is applied."""
        for pool, table in zip(self.pools, hit.shared, strict=True):
            for block in table:
                if block:
                    pool.share(block)
        for pool, tail in zip(self.pools, hit.tails, strict=False):
            pool.share(tail)
        size = self.block_size
        blocks = hit.computed // size
        sequence.tables = [list(table) for table in hit.shared]
        sequence.dead = [next((i for i, block in enumerate(table) if block), blocks) for table in hit.shared]
        sequence.slots = blocks * size
        sequence.next_fill = sequence.slots + size
        sequence.computed = sequence.planned = hit.computed
        sequence.expected = len(sequence.tokens)

    def copies(self, sequence: Sequence, hit: Hit) -> list[BlockCopy]:
        """Return the copies of the hit's tails into the sequence's own blocks, which `grow` must have allocated."""
        index = hit.computed // self.block_size
        return [BlockCopy(g, tail, sequence.tables[g][index]) for g, tail in enumerate(hit.tails)]

    # -- a sequence grows, settles and ends -------------------------------------------------------------------

    def reach(self, sequence: Sequence) -> int:
        """Return how many tokens the sequence would have room for if it got every available block."""
        return sequence.slots + min(pool.available for pool in self.pools) * self.block_size

    def grow(self, sequence: Sequence, end: int) -> tuple[tuple[int, ...], ...]:
        """Allocate blocks for `end` tokens. Return the new ids per group. The caller has checked `reach`."""
        count = -(-(end - sequence.slots) // self.block_size)
        added = []
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            blocks = pool.allocate(count)
            table += blocks
            added.append(tuple(blocks))
        sequence.slots += count * self.block_size
        return tuple(added)

    def settle(self, sequence: Sequence) -> None:
        """Publish the blocks that computed tokens have filled, and free those that no later token sees."""
        size = self.block_size
        first = sequence.next_fill // size - 1
        full = sequence.computed // size
        if self._caching:
            self.keys.extend(sequence.keys, sequence.request.root, sequence.tokens, full)
            for pool, table in zip(self.pools, sequence.tables, strict=True):
                for index in range(first, full):
                    pool.publish(table[index], sequence.keys[index])
        for g, window in self._limited:
            live = self._first_seen(window, sequence.computed)
            dead = sequence.dead[g]
            if live > dead:
                table = sequence.tables[g]
                self.pools[g].free(reversed(table[dead:live]), self._fence)
                table[dead:live] = [0] * (live - dead)
                sequence.dead[g] = live
        sequence.next_fill = (full + 1) * size

    def free(self, sequence: Sequence) -> None:
        """Free all blocks, the last one first, so that it is evicted before those that its key depends on."""
        for g, pool in enumerate(self.pools):
            pool.free(reversed(sequence.tables[g][sequence.dead[g] :]), self._fence)
        sequence.forget_blocks()

    def check_limits(self, limits: Items[int], max_tokens: int) -> None:
        """Raise ValueError for limits with which a sequence of `max_tokens` would not fit, or beyond the pools."""
        for need, limit, pool in zip(self.demand(max_tokens - 1), limits, self.pools, strict=True):
            if not need < limit <= pool.size:
                raise ValueError(
                    f"the KV cache would get {limit} blocks; it must be from {need + 1}, for one sequence of "
                    f"{max_tokens} tokens, to {pool.size}"
                )

    def resize(self, limits: Iterable[int]) -> None:
        """Set the limits of the pools, see BlockPool.resize. Sequences for which `exceeds` is true must be freed."""
        for pool, limit in zip(self.pools, limits, strict=True):
            pool.resize(limit)
        self.blocks_total = self._totals()

    def exceeds(self, sequence: Sequence) -> bool:
        """Return whether a sequence has a block that its pool may no longer have."""
        return any(max(table, default=0) >= pool.limit for pool, table in zip(self.pools, sequence.tables, strict=True))

    def forget(self) -> None:
        """Empty the prefix cache."""
        for pool in self.pools:
            pool.forget()

    # -- reports of what is cached ----------------------------------------------------------------------------

    def watch(self) -> None:
        """Report changes from now on, beginning with all that is cached."""
        self._watched.watch()
        self._reports = 0

    def changes(self) -> BlockChanges | None:
        """Return the blocks stored and removed since the last report. None if there are none, or without `watch`."""
        changed = self._watched.changes()
        if not changed and self._reports != 0:
            return None
        self._reports += 1
        stored = tuple(key for key, published in changed.items() if published)
        return BlockChanges(self._reports, stored, tuple(key for key, published in changed.items() if not published))

    # -- sizes ------------------------------------------------------------------------------------------------

    def _totals(self) -> tuple[int, ...]:
        return tuple(pool.total for pool in self.pools)

    def span(self, window: Window) -> int:
        """Return how many blocks a window can touch: with fewer, a sequence could not even decode."""
        return self._blocks(window.tokens - 1) + 1

    def demand(self, num_tokens: int) -> list[int]:
        """Return how many blocks per group a sequence with `num_tokens` computed tokens needs at least."""
        blocks = self._blocks(num_tokens)
        return [min(blocks, self.span(window)) if window else blocks for window in self.windows]

    # -- matching ---------------------------------------------------------------------------------------------

    def _longest_hit(self, sequence: Sequence, copying: bool) -> Hit:
        """Return the longest hit in published blocks, or in those of a running choice of the same request. Without
        `copying`, a hit has full blocks only."""
        nothing = Hit(0, tuple([] for _ in self.pools))
        if sequence.wants_rows or not self._shares:
            return nothing
        best = self._published(sequence, copying) if self._caching else nothing
        for sibling in sequence.request.choices.values():
            if sibling.phase is Phase.RUNNING and sibling.computed >= sequence.num_prompt:
                fork = self._fork(sequence, sibling, copying)
                if fork.computed > best.computed:
                    best = fork
        return best

    def _published(self, sequence: Sequence, copying: bool) -> Hit:
        """Return the longest hit in published blocks."""
        size = self.block_size
        known = len(sequence.tokens)
        self.keys.extend(sequence.keys, sequence.request.root, sequence.tokens, known // size)
        keys = sequence.keys
        count = known // size if copying else (known - 1) // size
        # Each group shortens the match to what it can serve; done when a round changes nothing.
        before = -1
        while count != before:
            before = count
            for pool, window in zip(self.pools, self.windows, strict=True):
                count = self._longest(pool, window, keys, count, known)
        # The last token is computed in any case: its logits are needed.
        computed = min(count * size, known - 1)
        whole = computed // size
        shared = []
        tails = []
        for pool, window in zip(self.pools, self.windows, strict=True):
            first = min(self._first_seen(window, computed), whole)
            shared.append([0] * first + [pool.match(key) or 0 for key in keys[first:whole]])
            if whole < count:
                tails.append(pool.match(keys[whole]) or 0)
        return Hit(computed, tuple(shared), tuple(tails))

    def _longest(self, pool: BlockPool, window: Window, keys: list[bytes], count: int, known: int) -> int:
        """Return the largest number of blocks up to `count` after which this group has all that the next token sees."""
        if not window:
            return next((i for i in range(count) if pool.match(keys[i]) is None), count)
        index = count
        while index > self._first_seen(window, min(count * self.block_size, known - 1)):
            index -= 1
            if pool.match(keys[index]) is None:
                count = index
        return count

    def _fork(self, sequence: Sequence, sibling: Sequence, copying: bool) -> Hit:
        """Return a hit in the blocks of a choice that has computed the prompt. Empty if a window has passed them."""
        size = self.block_size
        computed = min(sequence.num_prompt, len(sequence.tokens) - 1)
        if not copying:
            computed = computed // size * size
        whole = computed // size
        shared = []
        for g, window in enumerate(self.windows):
            first = min(self._first_seen(window, computed), whole)
            if sibling.dead[g] > first:
                return Hit(0, tuple([] for _ in self.pools))
            shared.append([0] * first + sibling.tables[g][first:whole])
        tails = tuple(table[whole] for table in sibling.tables) if computed % size else ()
        return Hit(computed, tuple(shared), tails)

    def _fits(self, sequence: Sequence, hit: Hit, spare: int) -> bool:
        """Return whether every pool has the blocks that the sequence needs after this hit, and `spare` more."""
        missing = self._blocks(sequence.target) - hit.computed // self.block_size
        for g, pool in enumerate(self.pools):
            shared = [block for block in hit.shared[g] if block]
            window = self.windows[g]
            need = min(missing, max(self.span(window) - len(shared), 1)) if window else missing
            taken = pool.idle(shared) + pool.idle(hit.tails[g : g + 1])
            if need + taken + spare > pool.available:
                return False
        return True

    def _first_seen(self, window: Window, position: int) -> int:
        """Return the index of the first block that the token at `position` sees."""
        return window.first_seen(position) // self.block_size

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
