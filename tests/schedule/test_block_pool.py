"""The blocks of one group: states, references, the order of eviction, fences."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.schedule.blocks import BlockPool
from tests.schedule.invariants import check_pool


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


def test_block_zero_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.available == 0


def test_the_lowest_free_block_is_allocated_first() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    pool.free([blocks[3], blocks[0], blocks[4]], 0)
    assert pool.allocate(2) == [blocks[0], blocks[3]]


def test_a_cached_block_is_matched_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    pool.free([block], 0)
    assert pool.match(key(1)) == block
    assert pool.allocate(1) == [block]
    assert pool.match(key(1)) is None


def test_the_block_freed_longest_ago_is_evicted_first() -> None:
    pool = BlockPool(4)
    first, second, third = pool.allocate(3)
    for number, block in enumerate((first, second, third)):
        pool.publish(block, key(number))
    pool.free([second, first, third], 0)
    pool.share(second)  # used again: now the youngest
    pool.free([second], 0)
    assert pool.allocate(3) == [first, third, second]


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(3)
    kept, plain = pool.allocate(2)
    pool.publish(kept, key(1))
    pool.free([kept, plain], 0)
    assert pool.allocate(1) == [plain]
    assert pool.match(key(1)) == kept


def test_a_fenced_block_is_not_handed_out_but_can_be_matched() -> None:
    pool = BlockPool(3)
    plain, published = pool.allocate(2)
    pool.publish(published, key(1))
    pool.free([plain, published], 7)
    assert (pool.available, pool.fenced) == (0, 2)
    pool.share(published)
    assert (pool.available, pool.fenced, pool.held) == (0, 1, 1)
    pool.release(6)
    assert pool.available == 0
    pool.release(7)
    assert pool.allocate(1) == [plain]


def test_an_old_fence_does_not_lift_a_newer_one() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, key(1))
    pool.free([block], 3)
    pool.share(block)
    pool.free([block], 5)
    pool.release(3)
    assert pool.available == 0
    pool.release(5)
    assert pool.available == 1


def test_the_first_block_published_under_a_key_stays_the_one() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.publish(first, key(1))
    pool.publish(second, key(1))
    pool.free([first, second], 0)
    assert pool.match(key(1)) == first
    assert pool.reusable == 1


def test_check_notices_a_reference_nobody_has() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    check_pool(pool, Counter([block]), Counter())
    with pytest.raises(RuntimeError, match="reference counts"):
        check_pool(pool, Counter(), Counter())


@pytest.mark.parametrize("published", [True, False])
def test_check_notices_a_block_that_must_not_be_written(published: bool) -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share(block)
    if published:
        pool.publish(block, key(1))
    writers = 1 if published else 2
    with pytest.raises(RuntimeError, match="writers"):
        check_pool(pool, Counter({block: 2}), Counter({block: writers}))


class PoolMachine(RuleBasedStateMachine):
    """The pool against a model that lists references and fences in the simplest way."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.held: list[int] = []
        self.plans = 0
        self.applied = 0
        self.fenced: dict[int, int] = {}  # block -> the plan it waits for
        self.content: dict[int, int] = {}  # block -> number of its key

    @precondition(lambda self: self.pool.available)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        blocks = self.pool.allocate(data.draw(st.integers(1, self.pool.available)))
        for block in blocks:
            assert block not in self.held
            assert self.fenced.pop(block, 0) <= self.applied
            self.content.pop(block, None)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        fence = self.plans if self.plans > self.applied else 0
        self.pool.free([block], fence)
        if block not in self.held:
            self.fenced[block] = fence

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 5))
    def publish(self, data: st.DataObject, number: int) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.pool.publish(block, key(number))
        if block not in self.content and number not in self.content.values():
            self.content[block] = number

    @rule(number=st.integers(0, 5))
    def share(self, number: int) -> None:
        block = self.pool.match(key(number))
        assert block == next((b for b, n in self.content.items() if n == number), None)
        if block is not None:
            self.pool.share(block)
            self.held.append(block)
            self.fenced.pop(block, None)

    @rule()
    def submit(self) -> None:
        self.plans += 1

    @precondition(lambda self: self.plans > self.applied)
    @rule()
    def apply(self) -> None:
        self.applied += 1
        self.pool.release(self.applied)

    @rule(limit=st.integers(1, 9))
    def resize(self, limit: int) -> None:
        self.pool.resize(limit)
        self.content = {block: number for block, number in self.content.items() if block < limit}
        for block in [block for block in self.held if block >= limit]:  # as the scheduler does
            self.held.remove(block)
            fence = self.plans if self.plans > self.applied else 0
            self.pool.free([block], fence)
            if block not in self.held:
                self.fenced[block] = fence

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.content.clear()

    @invariant()
    def books(self) -> None:
        check_pool(self.pool, Counter(self.held), Counter())
        waiting = [b for b, fence in self.fenced.items() if fence > self.applied and b < self.pool.limit]
        assert self.pool.available == self.pool.total - len(set(self.held)) - len(waiting)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
