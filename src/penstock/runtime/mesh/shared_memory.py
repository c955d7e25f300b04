"""Links through memory that the ranks of one machine share: about 5 µs an exchange, where a socket takes 300.

Each rank counts what it has written or read and polls the counts of the others. That needs no fences on processors that
make stores visible in program order; on others, ranks use sockets. The memory is an anonymous memfd, so the kernel
frees it however the ranks end.
"""

import mmap
import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

ORDERED_STORES = ("x86_64", "AMD64")  # processors that make stores visible in program order
SLOT_BYTES = 1 << 21  # one rank's part of an exchange; at least one row of logits must fit
SUM_BYTES = 1 << 18  # bytes of a tensor that are summed in one exchange: small enough that all parts stay in cache
COUNT_BYTES = 64  # distance between two counts: a cache line each, to avoid false sharing
SPINS = 1000  # polls of a count, about 100 µs, before the processor is yielded between polls
YIELD_SECONDS = 2e-3  # time in which polls yield the processor; after that they sleep in between
MAX_POLL_SECONDS = 1.0  # one poll adds at most this to the time waited: the process may have been stopped in between


def open_shared_memory(store: Store, rank: int, ranks: int, size: int) -> "SharedMemory | None":
    """Returns `size` zero bytes and a zero count per rank, shared by all `ranks`, which must all call this. Returns
    None on every rank when they are not all on one machine or the memory cannot be allocated."""
    here, memory = _machine(), None
    with ExitStack() as held:
        if rank == 0:
            offer = ""
            if here:
                with suppress(OSError):
                    memory, offer = _create(held, ranks, size)
            store.set("memory", f"{here} {offer}")
        where, path = store.get("memory").decode().split(" ")
        if rank and path and where == here:
            with suppress(OSError):
                memory = _attach(path, ranks)
        store.set(f"shares {rank}", "yes" if memory else "no")
        # Rank 0 must keep its descriptor open until every rank has answered.
        answers = [store.get(f"shares {other}") for other in range(ranks)]
    return memory if all(answer == b"yes" for answer in answers) else None


def _machine() -> str:
    """Identifies this boot of this machine and its PID namespace: processes with equal ids can open each other's
    /proc/PID/fd. "" when the processor does not support shared memory links."""
    if platform.machine() not in ORDERED_STORES:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _create(held: ExitStack, ranks: int, size: int) -> "tuple[SharedMemory, str]":
    """Allocates the memory. Returns it and the path by which other processes can open it until `held` closes. Raises
    OSError when there is too little memory; without fallocate the first access would raise SIGBUS instead."""
    descriptor = os.memfd_create("penstock")
    held.callback(os.close, descriptor)
    os.posix_fallocate(descriptor, 0, ranks * COUNT_BYTES + size)
    return SharedMemory(descriptor, ranks), f"/proc/{os.getpid()}/fd/{descriptor}"


def _attach(path: str, ranks: int) -> "SharedMemory":
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedMemory(descriptor, ranks)
    finally:
        os.close(descriptor)


class SharedMemory:
    """One int64 count per rank, and `bytes` for data."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.counts = np.frombuffer(memory, np.int64, ranks * COUNT_BYTES // 8)[:: COUNT_BYTES // 8]
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=ranks * COUNT_BYTES)

    def wait(self, rank: int, count: int, timeout: float) -> bool:
        """Polls until the count of `rank` is at least `count`. Returns False after `timeout` seconds."""
        counts = self.counts
        for _ in range(SPINS):
            if counts[rank] >= count:
                return True
        waited, last_poll = 0.0, time.perf_counter()
        while counts[rank] < count:
            if waited > timeout:
                return False
            time.sleep(0.0 if waited < YIELD_SECONDS else 50e-6)
            now = time.perf_counter()
            waited += min(now - last_poll, MAX_POLL_SECONDS)
            last_poll = now
        return True


class SharedRankLink:
    """A RankLink. In an exchange, each rank writes its part into its slot, counts up, and blocks until all other ranks
    have counted up too.

    Exchanges alternate between two sets of slots. A rank reuses a set only after the exchange in between, which every
    other rank enters after it has read the set."""

    def __init__(self, memory: SharedMemory, rank: int, ranks: int, timeout: float) -> None:
        self._memory, self._rank, self._ranks, self._timeout = memory, rank, ranks, timeout
        self._slots = memory.bytes.view(2, ranks, SLOT_BYTES)
        self._exchanges = 0
        self._shape: tuple[int, torch.dtype] = (0, torch.uint8)  # elements and dtype of the parts in `_parts`
        self._parts: tuple[list[Tensor], ...] = ()  # for each of the two sets, every rank's slot as a tensor

    @staticmethod
    def size(ranks: int) -> int:
        """The bytes of shared memory that a link of so many ranks needs."""
        return 2 * ranks * SLOT_BYTES

    def sum(self, x: Tensor) -> None:
        for piece in x.view(-1).split(SUM_BYTES // x.itemsize):
            parts = self._exchange(piece, piece.numel())
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece.add_(part)

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        widest = max(map(len, columns))
        step = SLOT_BYTES // (widest * x.itemsize)
        if not step:
            raise ValueError(f"a row of {widest} numbers exceeds a slot of {SLOT_BYTES} bytes of shared memory")
        for rows in range(0, len(x), step):
            piece = x[rows : rows + step]
            parts = self._exchange(piece.reshape(-1), len(piece) * widest)
            if whole is not None:
                for part, place in zip(parts, columns, strict=True):
                    values = part[: len(piece) * len(place)].view(len(piece), len(place))
                    whole[rows : rows + step, place.start : place.stop] = values

    def _exchange(self, x: Tensor, size: int) -> list[Tensor]:
        """Returns every rank's one-dimensional x, each at the start of a tensor of `size` elements. The tensors are
        valid until the next exchange."""
        shape = (size, x.dtype)
        if shape != self._shape:  # rare: most sums of a step have one size
            memory = self._slots[:, :, : size * x.itemsize]
            self._parts = tuple([memory[half, rank].view(x.dtype) for rank in range(self._ranks)] for half in (0, 1))
            self._shape = shape
        parts = self._parts[self._exchanges % 2]
        mine = parts[self._rank]
        (mine if len(x) == size else mine[: len(x)]).copy_(x)
        self._exchanges += 1
        self._memory.counts[self._rank] = self._exchanges
        for rank in range(self._ranks):
            if not self._memory.wait(rank, self._exchanges, self._timeout):
                raise TimeoutError(f"tensor rank {rank} did not reach this exchange")
        return parts


class SharedStageLink:
    """A StageLink. The sender is rank 0 and writes the slots in turn; the receiver is rank 1 and reads them. The counts
    are messages written and messages read."""

    def __init__(self, memory: SharedMemory, slots: int, timeout: float) -> None:
        self._memory, self._timeout = memory, timeout
        self._slots = memory.bytes.view(slots, -1)
        self._done = 0  # messages that this side has written or read

    def send(self, x: Tensor) -> None:
        if not self._memory.wait(1, self._done + 1 - len(self._slots), self._timeout):
            raise TimeoutError(f"all {len(self._slots)} slots hold messages that were not read")
        self._slot(x).copy_(x)
        self._done += 1
        self._memory.counts[0] = self._done

    def receive(self, x: Tensor) -> None:
        if not self._memory.wait(0, self._done + 1, self._timeout):
            raise TimeoutError("no message arrived")
        x.copy_(self._slot(x))
        self._done += 1
        self._memory.counts[1] = self._done

    def _slot(self, x: Tensor) -> Tensor:
        """The next slot, as a tensor with the shape and dtype of x."""
        slot = self._slots[self._done % len(self._slots)]
        if x.nbytes > len(slot):
            raise ValueError(f"{x.nbytes} bytes of hidden states exceed a slot of {len(slot)} bytes")
        return slot[: x.nbytes].view(x.dtype).view(x.shape)
