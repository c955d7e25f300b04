"""What always holds of a scheduler: its queues, its counts of tokens and its blocks agree with each other.

Every function raises RuntimeError that names what is broken. They are slow: every block is visited.
"""

from collections import Counter

from penstock.schedule import Scheduler
from penstock.schedule.blocks import BlockPool
from penstock.schedule.cache import KVCache
from penstock.schedule.live_requests import LiveRequests
from penstock.schedule.sequence import Phase, Sequence
from penstock.schedule.step import Outstanding


def check_scheduler(scheduler: Scheduler) -> None:
    """Check everything between two calls of the scheduler."""
    live, outstanding = scheduler._live, list(scheduler._outstanding)
    check_queues(live)
    check_counts(outstanding, live)
    copying = [tails for step in outstanding for tails in step.tails]
    check_cache(scheduler._cache, live.running, copying, scheduler.leases.held)
    if len(live.running) > scheduler._config.max_num_seqs:
        raise RuntimeError(f"{len(live.running)} sequences run, max_num_seqs={scheduler._config.max_num_seqs}")


def check_queues(live: LiveRequests) -> None:
    """Check that every choice is in the queue of its phase, and that the queues are in order."""
    by_phase: dict[Phase, list[Sequence]] = {phase: [] for phase in Phase}
    for request in live.requests.values():
        for sequence in request.choices.values():
            by_phase[sequence.phase].append(sequence)
    place = (lambda s: s.order) if live.fair is None else live.fair.place
    for phase, queue in ((Phase.RUNNING, live.running), (Phase.WAITING, list(live.waiting))):
        if queue != sorted(by_phase[phase], key=place):
            raise RuntimeError(f"the queue of {phase.value} sequences is not in order, or lacks one")
    held_back = [s for request in live.requests.values() for s in request.held_back]
    if held_back != by_phase[Phase.HELD_BACK] or by_phase[Phase.DONE]:
        raise RuntimeError("a sequence's phase differs from its queue, or it has ended and is still there")


def check_counts(outstanding: list[Outstanding], live: LiveRequests) -> None:
    """Check that each sequence counts the work of the outstanding plans, with all drafts accepted."""
    tokens, sampled = Counter[int](), Counter[int]()
    for step in outstanding:
        for sequence, work in zip(step.sequences, step.work, strict=True):
            tokens[sequence.id] += work.count
            sampled[sequence.id] += work.sample + work.drafts
    for state in live.requests.values():
        for s in state.choices.values():
            if s.phase is not Phase.RUNNING:
                continue  # a preempted sequence starts over; the results still to come bring tokens alone
            if (s.planned - s.computed, s.expected - len(s.tokens)) != (tokens[s.id], sampled[s.id]):
                raise RuntimeError(
                    f"sequence {s.id}: planned={s.planned} and expected={s.expected} are not {tokens[s.id]} beyond "
                    f"{s.computed} computed and {sampled[s.id]} beyond {len(s.tokens)} known tokens"
                )
            if s.planned > s.slots or s.expected > s.limit:
                raise RuntimeError(
                    f"sequence {s.id}: planned={s.planned} is over its {s.slots} slots, or expected={s.expected} "
                    f"over its limit of {s.limit} tokens"
                )


def check_cache(cache: KVCache, running: list[Sequence], copying: list[tuple[int, ...]], leased: Counter[int]) -> None:
    """Check the block tables of `running`, and that the pools count the references of these, of the tails being copied
    and of the blocks `leased` from the first group."""
    size = cache.block_size
    for g, pool in enumerate(cache.pools):
        references: Counter[int] = Counter(tails[g] for tails in copying)
        references.update(leased if g == 0 else ())
        written: Counter[int] = Counter()
        for sequence in running:
            table, dead = sequence.tables[g], sequence.dead[g]
            if len(table) * size != sequence.slots or any(table[:dead]) or not all(table[dead:]):
                raise RuntimeError(f"sequence {sequence.id}: table {table}, {dead} dead, {sequence.slots} slots")
            if cache._first_seen(cache.windows[g], sequence.computed) < dead:
                raise RuntimeError(f"sequence {sequence.id} gave back blocks that it still sees")
            references.update(table[dead:])
            written.update(table[sequence.computed // size :])
        check_pool(pool, references, written)


def check_pool(pool: BlockPool, tables: Counter[int], written: Counter[int]) -> None:
    """Check that every block is in one state. `tables`: references that exist. `written`: sequences about to write into
    a block."""
    refs = {block: count for block, count in enumerate(pool._refs) if count}
    if refs != dict(tables):
        raise RuntimeError(f"reference counts {refs} differ from the tables {dict(tables)}")
    states = [*refs, *pool._free, *pool._evictable, *(b for b, fence in enumerate(pool._fences) if fence)]
    gone = set(range(pool.limit, pool.size)) - set(states)
    if len(states) + len(gone) != pool.size - 1 or set(states) | gone != set(range(1, pool.size)):
        raise RuntimeError(f"blocks are lost or in two states: {sorted(states)} of {pool.total}")
    if pool.held != len(refs) or pool.fenced != sum(map(bool, pool._fences)):
        raise RuntimeError(f"counted {pool.held} held and {pool.fenced} fenced blocks, found {len(refs)} held")
    if max((*pool._free, *pool._evictable), default=0) >= pool.limit:
        raise RuntimeError(f"a block from {pool.limit} on may be allocated")
    published = {block: key for block, key in enumerate(pool._keys) if key is not None}
    if published != {block: key for key, block in pool._index.items()}:
        raise RuntimeError("the index and the keys of the blocks differ")
    if not set(pool._evictable) <= set(published) or set(pool._free) & set(published):
        raise RuntimeError("a cached block has no key, or a free one has")
    if pool.reusable != sum(not pool._refs[block] for block in published):
        raise RuntimeError(f"counted {pool.reusable} reusable blocks, which is wrong")
    for block, writers in written.items():
        if writers > 1 or block in published:
            raise RuntimeError(f"block {block} has {writers} writers, published: {block in published}")
