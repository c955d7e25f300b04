"""torch.distributed, for tensors only.

Process groups belong to who makes them: torch's default group, which is the whole process's, is not used. A group's own
timeout is heeded in collectives alone: whoever waits for a send or a receive has to say how long.
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
    """A RankLink over a process group."""

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


class GroupStageLink:
    """A StageLink, over a process group of the sender, which is rank 0 of it, and the other one."""

    def __init__(self, group: Any, slots: int, timeout: float | None) -> None:
        """Without a timeout the host waits for nothing: the device does, in the order of its work."""
        self._group, self._slots = group, slots
        self._timeout = () if timeout is None else (timedelta(seconds=timeout),)
        self._sending: deque[tuple[Any, Tensor]] = deque()  # work, and what has not been taken yet

    def send(self, x: Tensor) -> None:
        while len(self._sending) >= self._slots:
            work, _ = self._sending.popleft()
            work.wait(*self._timeout)
        copy = x.clone()
        self._sending.append((self._group.send([copy], 1, 0), copy))

    def receive(self, x: Tensor) -> None:
        self._group.recv([x], 0, 0).wait(*self._timeout)


class Transport(NamedTuple):
    """A transport of torch.distributed's."""

    # (store, rank, ranks, this machine's address, seconds to connect in, and for anything after) to a process group
    join: Callable[[Store, int, int, str, float, float], Any]
    waits: bool  # whether the host waits for what it does, and not the device alone


def _gloo(store: Store, rank: int, size: int, address: str, start_timeout: float, timeout: float) -> ProcessGroupGloo:
    """Over TCP, from this address: the machine's own name may lead nowhere."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._threads = 1  # one collective at a time
    options._timeout = timedelta(seconds=start_timeout)
    group = ProcessGroupGloo(store, rank, size, options)
    group.set_timeout(timedelta(seconds=timeout))
    return group


def _nccl(store: Store, rank: int, size: int, address: str, start_timeout: float, timeout: float) -> Any:
    """For tensors on GPUs, of the one that is current. NCCL chooses its interfaces itself (NCCL_SOCKET_IFNAME); it
    connects when the first tensor travels.

    Nobody waits for it here. Its watchdog ends this process where what was launched is not done after `start_timeout`
    seconds, in which another rank may be loading or compiling; what a captured step does it does not watch. A step is
    given up by the engine, and long before."""
    from torch.distributed import ProcessGroupNCCL  # here and not above: only a torch that was built for CUDA has it

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=start_timeout)
    return ProcessGroupNCCL(store, rank, size, options)


BACKENDS: Mapping[str, Transport] = MappingProxyType({"gloo": Transport(_gloo, True), "nccl": Transport(_nccl, False)})
