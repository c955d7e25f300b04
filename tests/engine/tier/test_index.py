"""The index of the disk tier: a set with times, and its size."""

import sys
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.tier import index
from penstock.engine.tier.index import DiskIndex

names = st.integers(0, 30).map(lambda i: i * (2**64 - 1) // 30)  # few, and up to the largest
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), names, st.integers(1, 100)),
        st.tuples(st.just("remove"), names, st.just(0)),
        st.tuples(st.just("oldest"), st.just(0), st.integers(0, 5)),
        st.tuples(st.just("since"), st.just(0), st.integers(0, 100)),
        st.tuples(st.just("clear"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(st.dictionaries(names, st.integers(1, 100)), actions)
def test_it_is_a_dict(first: dict[int, int], actions: list[tuple[str, int, int]]) -> None:
    index.RECENT, before = 5, index.RECENT
    try:
        found, model = DiskIndex(first.items()), dict(first)
        for action, name, value in actions:
            match action:
                case "add":
                    found.add(name, value)
                    model[name] = value
                case "remove":
                    found.remove(name)
                    model.pop(name, None)
                case "oldest":
                    taken = found.take_oldest(value)
                    assert len(set(taken)) == min(value, len(model))
                    ages = sorted(model.values())[: len(taken)]
                    assert sorted(model.pop(name) for name in taken) == ages
                case "since":
                    taken = found.take_unused_since(value)
                    assert set(taken) == {name for name, used in model.items() if used < value}
                    for name in taken:
                        del model[name]
                case "clear":
                    found.clear()
                    model.clear()
            assert len(found) == len(model)
            some = [name for name in sorted({*first, *model}) if name % 2]
            absent = next((i for i, name in enumerate(some) if name not in model), len(some))
            assert found.leading(some) == absent
            assert all((name in found) == (name in model) for name in {*first, *model, 7})
    finally:
        index.RECENT = before


def test_a_block_takes_less_than_100_bytes() -> None:
    """At its largest, too: while a million names are read, merged and evicted. So 1 TB of blocks of 64 KiB takes less
    than 2 GB."""
    count, more, step = 1_000_000, 5 * index.RECENT, 0x9E3779B97F4A7C15
    tracemalloc.start()
    try:
        found = DiskIndex((i * step % 2**64, i + 1) for i in range(count))
        for i in range(count, count + more):
            found.add(i * step % 2**64, i + 1)
        assert len(found.take_oldest(more)) == more
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == count
    assert kept / count < 20 and peak / count < 100, (kept / count, peak / count)
    assert sys.getsizeof(found._names) + sys.getsizeof(found._used) >= 12 * (count - index.RECENT)
    assert peak / count * 1e12 / (64 << 10) < 2e9
