"""Opens the tiers of an engine."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from penstock.config.engine import PageAccess
from penstock.config.kv_disk import DAYS, KVDisk
from penstock.config.sizes import format_bytes
from penstock.engine.tier.disk import POLL_SECONDS, DiskTier
from penstock.engine.tier.files import LOCK, PageFiles
from penstock.engine.tier.host import HostPages, StagedFiles
from penstock.engine.tier.lender import Lender
from penstock.engine.tier.peers import PageServer, PeerPages
from penstock.engine.tier.reader import BlockReader, PageSource
from penstock.engine.tier.tier import BlockTiers
from penstock.engine.tier.worker import JobThread, Results
from penstock.messages import Capacity, Executor, GenerateRequest
from penstock.schedule import Scheduler

LAST_WRITES_SECONDS = 2.0  # at the end of the engine, for blocks that are not written yet
CLOSE_SECONDS = 0.5  # for each thread's last job


@runtime_checkable
class HasPages(Protocol):
    """An executor whose KV cache is in this process's memory, or in that of its GPU."""

    def page(self, block: int) -> Any:
        """Return the memory of a block: all layers' keys and values, with their scales. On a GPU: a DevicePage."""

    def host_memory(self, size: int) -> memoryview:
        """Return memory that pages of a GPU can be copied to. Raises RuntimeError if there is none."""


class PageFolder:
    """The folder of --kv-disk, which one engine uses at a time."""

    def __init__(self, disk: KVDisk) -> None:
        """Raises ValueError, in one line, if another engine uses the folder; OSError if it cannot be made."""
        self.disk = disk
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

    def files(self, executor: HasPages, meaning: str) -> PageFiles | StagedFiles:
        """Return the files of an engine's pages."""
        page = executor.page(0)
        files = PageFiles(self._path, meaning, len(page))
        return files if isinstance(page, memoryview) else StagedFiles(files, executor.host_memory)


@contextlib.contextmanager
def open_tiers(
    folder: PageFolder | None,
    host_bytes: int | None,
    access: PageAccess | None,
    scheduler: Scheduler,
    executor: Executor,
    capacity: Capacity,
    wake: Callable[[], None],
) -> Iterator[BlockTiers]:
    """Open the tiers of an engine: its folder or the host's memory, and other engines. `wake` lets the engine's loop
    look at the results of threads. At the end, write what is not written yet, for a limited time. Raises ValueError if
    the engine cannot have a tier, and OSError if other engines could not connect."""
    if not isinstance(executor, HasPages) or len(capacity.groups) != 1 or capacity.keeps != "blocks":
        raise ValueError("--kv-disk and --role need a KV cache of one group, in the engine's process: leave them out")
    if access is not None and not isinstance(executor.page(0), memoryview):
        raise ValueError("--role needs a KV cache in the host's memory: leave it out, or set --device cpu")
    results: Results = Results()
    leases, identity = scheduler.leases, capacity.identity
    with contextlib.ExitStack() as held:
        disk = server = lender = None
        store: PageFiles | StagedFiles | HostPages | None = None
        flag, size, days = "--kv-host", host_bytes or 0, float(DAYS)
        if folder is not None:
            flag, (_, size, days) = "--kv-disk", folder.disk
            store = folder.files(executor, f"{identity.weights} {identity.numerics}")
        elif host_bytes:
            store = HostPages(executor.host_memory, len(executor.page(0)), host_bytes)
        if store is not None:
            if size < store.file_bytes:
                raise ValueError(
                    f"{flag} has {format_bytes(size)}, and a KV block takes {format_bytes(store.file_bytes)}: give a "
                    "larger size"
                )
            threads = JobThread("kv-reads", results), JobThread("kv-writes", results)
            for thread in threads:
                held.callback(thread.close, CLOSE_SECONDS)
            disk = DiskTier(
                store,
                leases,
                executor.page,
                threads,
                block_size=capacity.block_size,
                most_bytes=size,
                most_seconds=days * 86_400,
            )

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
