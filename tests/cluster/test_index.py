"""The index of cached blocks, beside a model that has every block of every engine."""

import tracemalloc
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import BlockIndex
from penstock.cluster.index import BOOKED_SECONDS, ENTRY_BYTES
from penstock.messages import BlockChanges, BlockKeys


def chain(text: str, count: int) -> list[bytes]:
    keys: list[bytes] = []
    BlockKeys(4, "weights").extend(keys, text.encode(), list(range(4 * count)), count)
    return keys


def test_an_engine_has_what_it_reports() -> None:
    index, keys = BlockIndex(), chain("a", 9)
    index.join("one", 1)
    index.join("two", 1)
    assert index.apply("one", 1, BlockChanges(1, tuple(keys[:6])))
    assert index.apply("two", 1, BlockChanges(1, tuple(keys[:2])))
    assert index.match(keys, 0.0) == {"one": 6, "two": 2}
    assert index.apply("one", 1, BlockChanges(2, tuple(keys[6:8]), ()))
    assert index.apply("two", 1, BlockChanges(2, (), tuple(keys[1:2])))
    assert index.match(keys, 0.0) == {"one": 8, "two": 1}
    assert index.match(chain("b", 9), 0.0) == {}
    assert index.match([], 0.0) == {}


def test_a_gap_is_reported_once_and_ends_with_a_first_report() -> None:
    index, keys = BlockIndex(), chain("a", 9)
    index.join("one", 1)
    assert index.apply("one", 1, BlockChanges(1, tuple(keys[:3])))
    assert not index.apply("one", 1, BlockChanges(3, tuple(keys[3:5])))
    assert index.match(keys, 0.0) == {"one": 3}, "what is known stays"
    assert index.apply("one", 1, BlockChanges(4, tuple(keys[5:6]))), "it has been asked for already"
    assert index.match(keys, 0.0) == {"one": 3}
    assert index.apply("one", 1, BlockChanges(1, tuple(keys[:8])))
    assert index.match(keys, 0.0) == {"one": 8}


def test_reports_of_another_incarnation_are_refused() -> None:
    index, keys = BlockIndex(), chain("a", 4)
    index.join("one", 1)
    index.apply("one", 1, BlockChanges(1, tuple(keys)))
    index.join("one", 2)
    assert index.match(keys, 0.0) == {}
    assert index.apply("one", 1, BlockChanges(2, tuple(keys)))
    assert index.match(keys, 0.0) == {}
    index.leave("one")
    assert index.apply("one", 2, BlockChanges(1, tuple(keys)))
    assert len(index) == 0


def test_a_booking_counts_for_a_short_time() -> None:
    index, keys = BlockIndex(), chain("a", 5)
    index.join("one", 1)
    index.book("one", keys, 100.0)
    assert index.match(keys, 100.0 + 0.9 * BOOKED_SECONDS) == {"one": 5}
    assert index.match(keys, 100.0 + 2 * BOOKED_SECONDS + 0.1) == {}
    index.book("nobody", keys, 100.0)


def test_a_block_that_was_evicted_counts_no_longer_although_it_was_booked() -> None:
    index, keys = BlockIndex(), chain("a", 5)
    index.join("one", 1)
    index.book("one", keys, 100.0)
    index.apply("one", 1, BlockChanges(1, tuple(keys)))
    index.apply("one", 1, BlockChanges(2, (), tuple(keys[2:])))
    assert index.match(keys, 101.0) == {"one": 2}
    index.apply("one", 1, BlockChanges(3, tuple(keys[2:])))
    assert index.match(keys, 101.0) == {"one": 5}


def test_it_is_bounded() -> None:
    index, keys = BlockIndex(max_bytes=100 * ENTRY_BYTES), chain("a", 400)
    index.join("one", 1)
    index.join("two", 1)
    index.apply("one", 1, BlockChanges(1, tuple(keys)))
    index.book("one", keys, 0.0)
    index.book("two", keys[:60], 0.0)
    assert index.match(keys, 0.0) == {"one": 50, "two": 50}
    assert index.dropped == 350
    assert len(index) == 100


def test_a_block_takes_at_most_200_bytes() -> None:
    index = BlockIndex()
    index.join("one", 1)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        keys = [sha256(bytes([number & 255, number >> 8 & 255, number >> 16])).digest() for number in range(100_000)]
        index.apply("one", 1, BlockChanges(1, tuple(keys)))
        del keys
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / len(index) <= ENTRY_BYTES


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["one", "two"]),
            st.sampled_from(["report", "lost", "restart"]),
            st.lists(st.integers(0, 11), max_size=6),
            st.lists(st.integers(0, 11), max_size=6),
        ),
        max_size=40,
    )
)
def test_it_never_differs_from_the_engines_after_their_reports(events) -> None:
    """Reports are lost, engines start again; an engine that is asked for a first report sends one."""
    keys, index = chain("a", 12), BlockIndex()
    held: dict[str, set[bytes]] = {"one": set(), "two": set()}
    number, incarnation = {"one": 0, "two": 0}, {"one": 1, "two": 1}
    for name in held:
        index.join(name, 1)
    for name, kind, stored, removed in events:
        if kind == "restart":
            incarnation[name] += 1
            number[name] = 0
            held[name] = set()
            index.join(name, incarnation[name])
            continue
        gone = {keys[key] for key in removed} & held[name]
        new = {keys[key] for key in stored} - gone
        first = number[name] == 0
        held[name] = held[name] - gone | new
        number[name] += 1
        changes = BlockChanges(number[name], tuple(held[name] if first else new), tuple(gone))
        if kind == "lost":
            continue
        if not index.apply(name, incarnation[name], changes):
            number[name] = 1
            assert index.apply(name, incarnation[name], BlockChanges(1, tuple(held[name])))
    for name, blocks in held.items():
        if not index.apply(name, incarnation[name], BlockChanges(number[name] + 1)):
            index.apply(name, incarnation[name], BlockChanges(1, tuple(blocks)))
    for key in keys:
        assert set(index.match([key], 0.0)) <= {name for name, blocks in held.items() if key in blocks}
