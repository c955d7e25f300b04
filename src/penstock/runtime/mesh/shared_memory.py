"""Implements the links between ranks of one machine through shared memory. An exchange of small tensors takes about
5 µs; through a socket it takes about 300 µs.

Each rank has a counter of its exchanges or messages in the shared memory, and polls the counters of the other ranks.
This needs no memory fences on processors that make stores visible in program order. On other processors, ranks use
sockets. The memory is an anonymous file (memfd), so the operating system frees it even if the ranks crash.
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
SLOT_BYTES = 1 << 21  # memory for one rank's tensor in an exchange; at least its part of one row of logits must fit
SUM_BYTES = 1 << 18  # a sum exchanges at most this much of a tensor at a time, so that all parts stay in cache
COUNT_BYTES = 64  # each counter has a cache line of its own, to avoid false sharing
# A rank polls a counter in three phases: without a pause, then yielding the processor, then sleeping between polls.
SPINS = 1000  # polls without a pause, about 100 µs
YIELD_SECONDS = 2e-3  # length of the second phase
MAX_POLL_SECONDS = 1.0  # that one poll adds to the time waited: a process that was stopped must not time out


def open_shared_memory(store: Store, rank: int, ranks: int, size: int) -> "SharedMemory | None":
    """Creates memory that `ranks` processes share: a counter for each of them and `size` bytes of data, all zero.

    All of these ranks must call this, each with its own `rank` from 0. Every rank gets None if they are not all on one
    machine, if the processor does not support these links, or if the memory cannot be allocated or opened."""
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
    """Returns an id of this machine, its current boot and this process's PID namespace. Processes with equal ids find
    each other under /proc/PID/fd. Returns "" if the processor does not support these links."""
    if platform.machine() not in ORDERED_STORES:
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _create(held: ExitStack, ranks: int, size: int) -> "tuple[SharedMemory, str]":
    """Allocates the memory. Returns it, and the path with which other processes can open it until `held` closes. Raises
    OSError if there is too little memory: fallocate reports this here, and not by a SIGBUS at the first access."""
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
    """Maps shared memory into this process. `counts` has an int64 counter for each rank, and `bytes` is for data."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self.counts = np.frombuffer(memory, np.int64, ranks * COUNT_BYTES // 8)[:: COUNT_BYTES // 8]
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=ranks * COUNT_BYTES)

    def wait(self, rank: int, count: int, timeout: float) -> bool:
        """Polls until the counter of `rank` is at least `count`. Returns False after `timeout` seconds."""
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
    """Implements RankLink with shared memory. In an exchange, each rank writes its tensor into its slot and increments
    its counter. Then it blocks until all other ranks have incremented theirs.

    There are two sets of slots, and exchanges use them in turn. A rank that reads a set enters the next exchange only
    afterwards. So when that exchange is complete, all ranks have read the set, and it can be overwritten."""

    def __init__(self, memory: SharedMemory, rank: int, ranks: int, timeout: float) -> None:
        self._memory, self._rank, self._ranks, self._timeout = memory, rank, ranks, timeout
        self._slots = memory.bytes.view(2, ranks, SLOT_BYTES)
        self._exchanges = 0
        self._shape: tuple[int, torch.dtype] = (0, torch.uint8)  # elements and dtype of the parts in `_parts`
        self._parts: tuple[list[Tensor], ...] = ()  # for each of the two sets, every rank's slot as a tensor

    @staticmethod
    def size(ranks: int) -> int:
        """Returns the bytes of shared memory that a link between this number of ranks needs."""
        return 2 * ranks * SLOT_BYTES

    def sum(self, x: Tensor) -> None:
        """Sums as RankLink.sum. Every rank gets the parts of all ranks and adds them in rank order."""
        for piece in x.view(-1).split(SUM_BYTES // x.itemsize):
            parts = self._exchange(piece, piece.numel())
            torch.add(parts[0], parts[1], out=piece)
            for part in parts[2:]:
                piece.add_(part)

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        """Gathers as RankLink.gather, in pieces of as many rows as fit in a slot."""
        widest = max(map(len, columns))
        step = SLOT_BYTES // (widest * x.itemsize)
        if not step:
            raise ValueError(
                f"a row of {widest * x.itemsize} bytes exceeds a slot of {SLOT_BYTES} bytes of shared memory"
            )
        for rows in range(0, len(x), step):
            piece = x[rows : rows + step]
            parts = self._exchange(piece.reshape(-1), len(piece) * widest)
            if whole is not None:
                for part, place in zip(parts, columns, strict=True):
                    values = part[: len(piece) * len(place)].view(len(piece), len(place))
                    whole[rows : rows + step, place.start : place.stop] = values

    def _exchange(self, x: Tensor, size: int) -> list[Tensor]:
        """Sends the one-dimensional x to all ranks and returns the list of all ranks' x, in rank order.

        Each tensor of the list has `size` elements; those after the rank's x are undefined. The caller must have read
        the tensors before the next exchange. Raises TimeoutError if a rank does not join in time."""
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
                raise TimeoutError(f"tensor rank {rank} did not join the exchange within {self._timeout:g} s")
        return parts


class SharedStageLink:
    """Implements StageLink with shared memory. Rank 0 of the link sends: it writes the slots in turn and counts
    messages written. Rank 1 receives: it reads the slots in the same order and counts messages read."""

    def __init__(self, memory: SharedMemory, slots: int, timeout: float) -> None:
        self._memory, self._timeout = memory, timeout
        self._slots = memory.bytes.view(slots, -1)
        self._done = 0  # messages that this side has written or read

    def send(self, x: Tensor) -> None:
        """Sends as StageLink.send: blocks while all slots are full."""
        if not self._memory.wait(1, self._done + 1 - len(self._slots), self._timeout):
            raise TimeoutError(
                f"the next stage read no message within {self._timeout:g} s, and all {len(self._slots)} slots are full"
            )
        self._slot(x).copy_(x)
        self._done += 1
        self._memory.counts[0] = self._done

    def receive(self, x: Tensor) -> None:
        """Receives as StageLink.receive: blocks until there is a message."""
        if not self._memory.wait(0, self._done + 1, self._timeout):
            raise TimeoutError(f"the previous stage sent no message within {self._timeout:g} s")
        x.copy_(self._slot(x))
        self._done += 1
        self._memory.counts[1] = self._done

    def _slot(self, x: Tensor) -> Tensor:
        """Returns the slot of the next message as a tensor with the shape and dtype of x."""
        slot = self._slots[self._done % len(self._slots)]
        if x.nbytes > len(slot):
            raise ValueError(f"hidden states of {x.nbytes} bytes exceed a slot of {len(slot)} bytes of shared memory")
        return slot[: x.nbytes].view(x.dtype).view(x.shape)
