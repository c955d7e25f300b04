"""Opens the disk tier of an engine."""

import contextlib
import fcntl
import os
import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.config.kv_disk import KVDisk
from penstock.config.sizes import format_bytes
from penstock.engine.tier.files import LOCK, PageFiles
from penstock.engine.tier.tier import POLL_SECONDS, DiskTier
from penstock.engine.tier.worker import DiskThread
from penstock.messages import Capacity, Executor
from penstock.schedule import Scheduler

LAST_WRITES_SECONDS = 2.0  # at the end of the engine, for blocks that are not written yet
CLOSE_SECONDS = 0.5  # for each thread's last job


@runtime_checkable
class HasPages(Protocol):
    """An executor whose KV cache is in this process's memory."""

    def page(self, block: int) -> memoryview:
        """Return the memory of a block: all layers' keys and values, with their scales."""
        ...


class PageFolder:
    """The folder of --kv-disk, which one engine uses at a time."""

    def __init__(self, disk: KVDisk) -> None:
        """Raises ValueError, in one line, if another engine uses the folder; OSError if it cannot be made."""
        self._disk = disk
        self._path = Path(disk.folder).absolute()
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 20, 0).decode(errors="replace")
            self.close()
            raise ValueError(
                f"--kv-disk: {disk.folder} is used by another engine, process {holder}: name another folder, or end it"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        """Let other engines use the folder."""
        os.close(self._lock)

    @contextlib.contextmanager
    def tier(self, scheduler: Scheduler, executor: Executor, capacity: Capacity) -> Iterator[DiskTier]:
        """Open the tier of an engine. At the end, write what is not written yet, for a limited time. Raises ValueError
        if the engine cannot have a tier."""
        if not isinstance(executor, HasPages) or len(capacity.groups) != 1 or capacity.keeps != "blocks":
            raise ValueError("--kv-disk needs a KV cache of one group, in the engine's own process: leave it out")
        meaning = f"{capacity.identity.weights} {capacity.identity.numerics}"
        files = PageFiles(self._path, meaning, len(executor.page(0)))
        if self._disk.bytes < files.file_bytes:
            raise ValueError(
                f"--kv-disk has {format_bytes(self._disk.bytes)}, and the file of a KV block has "
                f"{format_bytes(files.file_bytes)}: give a larger size"
            )
        results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threads = DiskThread("kv-reads", results), DiskThread("kv-writes", results)
        tier = DiskTier(
            files,
            scheduler.leases,
            executor.page,
            threads,
            results,
            block_size=capacity.block_size,
            most_bytes=self._disk.bytes,
            most_seconds=self._disk.days * 86_400,
        )
        try:
            yield tier
            end = time.monotonic() + LAST_WRITES_SECONDS
            while time.monotonic() < end and tier.due(end) is not None:
                tier.advance(time.monotonic())
                time.sleep(POLL_SECONDS)
        finally:
            for thread in threads:
                thread.close(CLOSE_SECONDS)
