"""Links over process groups of torch.distributed, and how to create the groups.

Each link has a process group of its own; torch's default group, which is global to the process, is not used. Torch
applies a group's own timeout to collectives only, so that sends and receives pass theirs to `wait`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store


class GroupRankLink:
    """Implements RankLink with a process group."""

    def __init__(self, group: Any, rank: int, ranks: int, timeout: float) -> None:
        self._group, self._rank, self._ranks, self._timeout = group, rank, ranks, timedelta(seconds=timeout)
        self._received = torch.empty(0, dtype=torch.uint8)  # the parts of a sum; grows as needed

    def sum(self, x: Tensor) -> None:
        """Sums as RankLink.sum. Every rank gathers all parts and adds them in rank order; gloo's allreduce would add in
        another order."""
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
            received = x.new_empty(len(x), len(columns[rank]))
            self._group.recv([received], rank, 0).wait(self._timeout)
            whole[:, columns[rank].start : columns[rank].stop] = received


class GroupStageLink:
    """Implements StageLink with a process group of two ranks: rank 0 sends, rank 1 receives."""

    def __init__(self, group: Any, slots: int, timeout: float | None) -> None:
        """`slots` is the number of sends that may be unfinished at once. `timeout` is None for a backend that does not
        block the host (NCCL): there, `wait` makes the device's stream block instead."""
        self._group, self._slots = group, slots
        self._timeout = () if timeout is None else (timedelta(seconds=timeout),)
        self._sending: deque[tuple[Any, Tensor]] = deque()  # unfinished sends: torch's work and the copy it reads

    def send(self, x: Tensor) -> None:
        while len(self._sending) >= self._slots:
            work, _ = self._sending.popleft()
            work.wait(*self._timeout)
        copy = x.clone()
        self._sending.append((self._group.send([copy], 1, 0), copy))

    def receive(self, x: Tensor) -> None:
        self._group.recv([x], 0, 0).wait(*self._timeout)


class Transport(NamedTuple):
    """Describes a backend of torch.distributed."""

    # (store, rank, ranks, this machine's address, seconds to connect, seconds per later operation) -> process group
    join: Callable[[Store, int, int, str, float, float], Any]
    blocks_host: bool  # True: `wait` blocks the host, False: only the device's stream


def _gloo(store: Store, rank: int, size: int, address: str, start_timeout: float, timeout: float) -> ProcessGroupGloo:
    """Creates a gloo group over TCP. It binds to `address`, because the machine's host name may not resolve."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1  # one collective at a time
    options._timeout = timedelta(seconds=start_timeout)
    group = ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(timedelta(seconds=timeout))
    return group


def _nccl(store: Store, rank: int, size: int, address: str, start_timeout: float, timeout: float) -> Any:
    """Creates an NCCL group for tensors on the current GPU. NCCL chooses its network interfaces itself
    (NCCL_SOCKET_IFNAME) and connects at the first exchange.

    The host never blocks on it. NCCL's watchdog ends this process when an operation is not done after `start_timeout`
    seconds; the limit is that long because another rank may still be loading or compiling. The watchdog does not cover
    captured graphs. The engine gives up a step much earlier."""
    from torch.distributed import ProcessGroupNCCL  # imported here: only torch builds with CUDA have it

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=start_timeout)
    return ProcessGroupNCCL(store, rank, size, options)


BACKENDS: Mapping[str, Transport] = MappingProxyType({"gloo": Transport(_gloo, True), "nccl": Transport(_nccl, False)})
