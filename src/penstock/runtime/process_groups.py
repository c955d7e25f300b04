"""torch.distributed, for tensors only.

Process groups belong to who makes them: torch's default group, which is the whole process's, is not used. A group's own
timeout is heeded in collectives alone: whoever waits for a send or a receive has to say how long.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store


class GroupLink:
    """A Link over a process group."""

    def __init__(self, group: Any, rank: int, ranks: int, timeout: float) -> None:
        self._group, self._rank, self._ranks, self._timeout = group, rank, ranks, timedelta(seconds=timeout)
        self._received = torch.empty(0, dtype=torch.uint8)  # memory for a sum's parts

    def sum(self, x: Tensor) -> None:
        """Every rank gets all parts whole: a reduction of the transport's would add in an order of its own."""
        size = self._ranks * x.nbytes
        if self._received.numel() < size:
            self._received = torch.empty(size, dtype=torch.uint8)
        parts = list(self._received[:size].view(x.dtype).view(-1, *x.shape))
        self._group.allgather([parts], [x]).wait(self._timeout)
        torch.add(parts[0], parts[1], out=x)
        for other in parts[2:]:
            x.add_(other)

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        if whole is None:
            self._group.send([x], 0, 0).wait(self._timeout)
            return
        whole[:, : len(columns[0])] = x
        for rank in range(1, self._ranks):
            theirs = x.new_empty(len(x), len(columns[rank]))
            self._group.recv([theirs], rank, 0).wait(self._timeout)
            whole[:, columns[rank].start : columns[rank].stop] = theirs


class GroupLane:
    """A Lane, over a process group of the sender, which is rank 0 of it, and the other one."""

    def __init__(self, group: Any, slots: int, timeout: float) -> None:
        self._group, self._slots, self._timeout = group, slots, timedelta(seconds=timeout)
        self._sending: deque[tuple[Any, Tensor]] = deque()  # work, and what has not been taken yet

    def send(self, x: Tensor) -> None:
        while len(self._sending) >= self._slots:
            work, _ = self._sending.popleft()
            work.wait(self._timeout)
        copy = x.clone()
        self._sending.append((self._group.send([copy], 1, 0), copy))

    def receive(self, x: Tensor) -> None:
        self._group.recv([x], 0, 0).wait(self._timeout)


def _gloo(store: Store, rank: int, size: int, address: str, start_timeout: float, timeout: float) -> ProcessGroupGloo:
    """Over TCP, from this address: the machine's own name may lead nowhere."""
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1  # one collective at a time
    options._timeout = timedelta(seconds=start_timeout)
    group = ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(timedelta(seconds=timeout))
    return group


# (store, rank, ranks, this machine's address, seconds to connect in, and for anything after) to a process group.
BACKENDS: Mapping[str, Callable[[Store, int, int, str, float, float], Any]] = MappingProxyType({"gloo": _gloo})
