"""Tensors between ranks of one machine, through memory that they share: some 5 µs where a socket takes 300.

Ranks count what they have written or read, and wait for each other's counts. Processors that keep stores in order need
no fences for that; on others ranks use sockets. The memory is no file's: however the ranks end, nothing is left of it.
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

ORDERED = ("x86_64", "AMD64")  # processors whose stores are seen in program order
SLOT = 1 << 21  # bytes of a part in an exchange: a row of logits, at the least
SUMMED = 1 << 18  # bytes added at once: parts are in cache still
COUNT = 64  # bytes between two counts: a cache line, so that nobody waits on another's
SPINS = 1000  # looks at a count, some 100 µs, before others may have the processor
PATIENCE = 2e-3  # seconds until it sleeps between looks
LONGEST_LOOK = 1.0  # what one look counts as at most: time in which all were stopped is nobody's delay


def share(store: Store, rank: int, ranks: int, size: int) -> "SharedMemory | None":
    """`size` bytes of zeros and a count for each of these ranks, which all call this. None where they are not all on
    one machine, or it has no such memory."""
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
        # Of all of them: the first keeps the way to the memory open until nobody needs it any more.
        answers = [store.get(f"shares {other}") for other in range(ranks)]
    return memory if all(answer == b"yes" for answer in answers) else None


def _machine() -> str:
    """Where a process is known by the same number: this boot of this machine, and this namespace of processes. Nothing
    where ranks share no memory."""
    if platform.machine() not in ORDERED:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _create(held: ExitStack, ranks: int, size: int) -> "tuple[SharedMemory, str]":
    """The memory, and the path by which others get to it while `held` is. It is there: where there is not as much, that
    is an OSError now, not a signal later."""
    descriptor = os.memfd_create("penstock")
    held.callback(os.close, descriptor)
    os.posix_fallocate(descriptor, 0, ranks * COUNT + size)
    return SharedMemory(descriptor, ranks), f"/proc/{os.getpid()}/fd/{descriptor}"


def _attach(path: str, ranks: int) -> "SharedMemory":
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return SharedMemory(descriptor, ranks)
    finally:
        os.close(descriptor)


class SharedMemory:
    """A count for each of the ranks, and bytes."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.counts = np.frombuffer(memory, np.int64, ranks * COUNT // 8)[:: COUNT // 8]
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=ranks * COUNT)

    def wait(self, rank: int, count: int, timeout: float) -> bool:
        """For a rank to count so far; whether it has, within so many seconds."""
        counts = self.counts
        for _ in range(SPINS):
            if counts[rank] >= count:
                return True
        waited, looked = 0.0, time.perf_counter()
        while counts[rank] < count:
            if waited > timeout:
                return False
            time.sleep(0.0 if waited < PATIENCE else 50e-6)
            now = time.perf_counter()
            waited += min(now - looked, LONGEST_LOOK)
            looked = now
        return True


class SharedRankLink:
    """A RankLink. In an exchange each rank writes its part into a slot, counts up, and waits until all others have.

    There are two sets of slots, used in turn: a rank that writes to one again has seen all others count up once more
    since, so they have read it."""

    def __init__(self, memory: SharedMemory, rank: int, ranks: int, timeout: float) -> None:
        self._memory, self._rank, self._ranks, self._timeout = memory, rank, ranks, timeout
        self._slots = memory.bytes.view(2, ranks, SLOT)
        self._exchanges = 0
        self._kind: tuple[int, torch.dtype] = (0, torch.uint8)  # elements of the last parts, and their dtype
        self._parts: tuple[list[Tensor], ...] = ()  # memory for such parts: of each rank, in both sets

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes that it takes."""
        return 2 * ranks * SLOT

    def sum(self, x: Tensor) -> None:
        for piece in x.view(-1).split(SUMMED // x.itemsize):
            parts = self._exchange(piece, piece.numel())
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece.add_(part)

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        widest = max(map(len, columns))
        step = SLOT // (widest * x.itemsize)
        if not step:
            raise ValueError(f"a row of {widest} numbers does not fit into {SLOT} bytes of shared memory")
        for rows in range(0, len(x), step):
            piece = x[rows : rows + step]
            parts = self._exchange(piece.reshape(-1), len(piece) * widest)
            if whole is not None:
                for part, place in zip(parts, columns, strict=True):
                    theirs = part[: len(piece) * len(place)].view(len(piece), len(place))
                    whole[rows : rows + step, place.start : place.stop] = theirs

    def _exchange(self, x: Tensor, room: int) -> list[Tensor]:
        """Every rank's x, of one dimension, each at the start of `room` elements. Valid until the exchange after the
        next."""
        kind = (room, x.dtype)
        if kind != self._kind:  # in a step, most sums are of one size
            memory = self._slots[:, :, : room * x.itemsize]
            self._parts = tuple([memory[half, rank].view(x.dtype) for rank in range(self._ranks)] for half in (0, 1))
            self._kind = kind
        parts = self._parts[self._exchanges % 2]
        mine = parts[self._rank]
        (mine if len(x) == room else mine[: len(x)]).copy_(x)
        self._exchanges += 1
        self._memory.counts[self._rank] = self._exchanges
        for rank in range(self._ranks):
            if not self._memory.wait(rank, self._exchanges, self._timeout):
                raise TimeoutError(f"tensor rank {rank} did not come")
        return parts


class SharedStageLink:
    """A StageLink. The sender, rank 0 of two, writes into slots in turn, and the other one reads; each counts."""

    def __init__(self, memory: SharedMemory, slots: int, timeout: float) -> None:
        self._memory, self._timeout = memory, timeout
        self._slots = memory.bytes.view(slots, -1)
        self._done = 0  # what this side has counted

    def send(self, x: Tensor) -> None:
        if not self._memory.wait(1, self._done + 1 - len(self._slots), self._timeout):
            raise TimeoutError(f"it took none of {len(self._slots)} before")
        self._slot(x).copy_(x)
        self._done += 1
        self._memory.counts[0] = self._done

    def receive(self, x: Tensor) -> None:
        if not self._memory.wait(0, self._done + 1, self._timeout):
            raise TimeoutError("it sent nothing")
        x.copy_(self._slot(x))
        self._done += 1
        self._memory.counts[1] = self._done

    def _slot(self, x: Tensor) -> Tensor:
        """The next one, as memory of a tensor like x."""
        slot = self._slots[self._done % len(self._slots)]
        if x.nbytes > len(slot):
            raise ValueError(f"{x.nbytes} bytes of hidden states are more than the {len(slot)} that were agreed upon")
        return slot[: x.nbytes].view(x.dtype).view(x.shape)
