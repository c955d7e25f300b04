"""Opens the tiers of an engine."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.config.engine import PageAccess
from penstock.config.kv_disk import KVDisk
from penstock.config.sizes import format_bytes
from penstock.engine.tier.disk import POLL_SECONDS, DiskTier
from penstock.engine.tier.files import LOCK, PageFiles
from penstock.engine.tier.lender import Lender
from penstock.engine.tier.peers import PageServer, PeerPages
from penstock.engine.tier.reader import BlockReader, PageSource
from penstock.engine.tier.tier import BlockTiers
from penstock.engine.tier.worker import JobThread, Results
from penstock.messages import Capacity, Executor, GenerateRequest
from penstock.schedule import Scheduler
from penstock.schedule.leases import BlockLeases

Page = Callable[[int], memoryview]  # returns the memory of a block

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
    def tier(
        self, leases: BlockLeases, page: Page, meaning: str, block_size: int, results: Results
    ) -> Iterator[DiskTier]:
        """Open the tier of an engine. Raises ValueError for a size that is too small."""
        files = PageFiles(self._path, meaning, len(page(0)))
        if self._disk.bytes < files.file_bytes:
            raise ValueError(
                f"--kv-disk has {format_bytes(self._disk.bytes)}, and the file of a KV block has "
                f"{format_bytes(files.file_bytes)}: give a larger size"
            )
        threads = JobThread("kv-reads", results), JobThread("kv-writes", results)
        try:
            yield DiskTier(
                files,
                leases,
                page,
                threads,
                block_size=block_size,
                most_bytes=self._disk.bytes,
                most_seconds=self._disk.days * 86_400,
            )
        finally:
            for thread in threads:
                thread.close(CLOSE_SECONDS)


@contextlib.contextmanager
def open_tiers(
    folder: PageFolder | None,
    access: PageAccess | None,
    scheduler: Scheduler,
    executor: Executor,
    capacity: Capacity,
    wake: Callable[[], None],
) -> Iterator[BlockTiers]:
    """Open the tiers of an engine: its folder, and other engines. `wake` lets the engine's loop look at the results of
    threads. At the end, write what is not written yet, for a limited time. Raises ValueError if the engine cannot have
    a tier, and OSError if other engines could not connect."""
    if not isinstance(executor, HasPages) or len(capacity.groups) != 1 or capacity.keeps != "blocks":
        raise ValueError("--kv-disk and --role need a KV cache of one group, in the engine's process: leave them out")
    results: Results = Results()
    leases, identity = scheduler.leases, capacity.identity
    with contextlib.ExitStack() as held:
        disk = server = lender = None
        if folder is not None:
            meaning = f"{identity.weights} {identity.numerics}"
            disk = held.enter_context(folder.tier(leases, executor.page, meaning, capacity.block_size, results))

        def source(request: GenerateRequest) -> PageSource | None:
            if request.pages is not None and access is not None:
                return PeerPages(request.pages, access, identity.fingerprint, results, tiers.count)
            return disk if disk is not None and disk.has_blocks else None

        reader = BlockReader(leases, executor.page, capacity.block_size, source)
        if access is not None:
            lender = Lender(leases, executor.page, lambda name: reader.waits(name) or scheduler.has(name))
            server = held.enter_context(
                contextlib.closing(PageServer(access, identity.fingerprint, lender, results, wake))
            )
        tiers = BlockTiers(reader, results, disk=disk, lender=lender, page_port=0 if server is None else server.port)
        yield tiers
        end = time.monotonic() + LAST_WRITES_SECONDS
        while disk is not None and time.monotonic() < end and disk.due(end) is not None:
            tiers.advance(time.monotonic())
            time.sleep(POLL_SECONDS)
