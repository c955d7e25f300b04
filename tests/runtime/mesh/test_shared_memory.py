"""Ranks of one machine get shared memory; ranks of several machines get none."""

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from penstock.runtime.mesh import shared_memory
from penstock.runtime.mesh.shared_memory import MAX_POLL_SECONDS, SharedMemory, open_shared_memory
from tests.engine.processes import descriptors

SIZE = 1000


def shared(ranks: int) -> list[SharedMemory | None]:
    """Returns what each rank gets. Ranks are threads."""
    store, got = HashStore(), dict[int, SharedMemory | None]()

    def open_part(rank: int) -> None:
        got[rank] = open_shared_memory(store, rank, ranks, SIZE)

    threads = [threading.Thread(target=open_part, args=(rank,), name=str(rank)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [got[rank] for rank in range(ranks)]


def test_what_one_writes_the_others_read() -> None:
    before = descriptors()
    parts = shared(3)
    for rank, part in enumerate(parts):
        assert part is not None
        assert len(part.bytes) == SIZE and not part.bytes.any() and len(part.counts) == 3
        part.counts[rank] = rank + 1
    parts[1].bytes[7] = 9
    assert [int(part.bytes[7]) for part in parts] == [9, 9, 9]
    assert all(part.wait(rank, rank + 1, 0.0) for part in parts for rank in range(3))
    assert not parts[0].wait(0, 2, 0.01)
    del part, parts
    assert descriptors() == before


def test_nothing_is_left_however_the_ranks_end() -> None:
    """Nothing is left even if rank 0 is killed while it waits for the others."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    before = set(Path("/dev/shm").glob("*penstock*"))  # servers note there how much memory they may take
    with pytest.raises(RuntimeError):
        open_shared_memory(store, 0, 2, SIZE)
    assert store.get("memory")
    assert set(Path("/dev/shm").glob("*penstock*")) <= before


def elsewhere() -> str:
    """Returns a different machine for each rank."""
    return f"boot/{threading.current_thread().name}"


@pytest.mark.parametrize(
    "machine", [elsewhere, lambda: "", lambda: "" if threading.current_thread().name == "1" else "boot/0"]
)
def test_ranks_that_are_not_all_on_one_machine_share_nothing(
    machine: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "_machine", machine)
    assert shared(3) == [None, None, None]


def test_where_there_is_no_such_memory_nobody_has_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError("no space left on device")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert shared(2) == [None, None]
    assert descriptors() == before


def test_time_in_which_this_process_was_stopped_is_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100_000, 1000))  # each look a thousand seconds later
    monkeypatch.setattr(shared_memory.time, "perf_counter", lambda: next(clock))
    (memory,) = shared(1)
    assert memory is not None
    looks = 5
    assert not memory.wait(0, 1, looks * MAX_POLL_SECONDS)
    assert next(clock) >= 1000 * looks
