"""Collectives between tensor ranks on devices, launched on the device's current stream like any other kernel.

Over NCCL these calls never block the host. When one rank does not take part, the devices of the others block and no
call raises: the engine detects that no result arrives (see engine/ranks/supervision.py). Over gloo, which replaces NCCL
on machines without a GPU, a collective is complete when its call returns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, GatherOptions

from penstock.config.split import part


class ExchangeLimits(NamedTuple):
    """Holds the sizes of the largest tensors that ranks on devices exchange. Buffers of these sizes are allocated once,
    because captured CUDA graphs keep their addresses."""

    device: torch.device
    tokens: int  # the most tokens of a step
    hidden: int  # the width of hidden states
    dtype: torch.dtype  # of hidden states
    rows: int  # the most rows of logits
    vocabulary: int  # the width of logits
    ordered: bool  # True: sums add in rank order; False: in the order that is fastest


class DeviceLink:
    """Implements RankLink with a process group, and `broadcast` in addition."""

    def __init__(self, group: Any, rank: int, ranks: int, limits: ExchangeLimits) -> None:
        self._group, self._rank, self._ranks = group, rank, ranks
        self._allreduce, self._allgather = AllreduceOptions(), AllgatherOptions()
        self._gather, self._broadcast = GatherOptions(), BroadcastOptions()
        for options in (self._allreduce, self._allgather, self._gather, self._broadcast):
            options.asyncOp = False  # run on the device's current stream, in order with the kernels around it

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=limits.device)

        self._parts = empty(ranks * limits.tokens * limits.hidden, limits.dtype) if limits.ordered else None
        widest = len(part(limits.vocabulary, ranks, 0))
        self._padded = empty(limits.rows * widest, torch.float32)
        self._gathered = empty(ranks * limits.rows * widest if rank == 0 else 0, torch.float32)

    def sum(self, x: Tensor) -> None:
        """Sums as RankLink.sum. If sums must add in rank order, every rank gathers all parts and adds them: an
        allreduce would add in an order that depends on the size of the tensor."""
        if self._parts is None:
            _finish(self._group.allreduce([x], self._allreduce))
            return
        received = self._parts[: self._ranks * x.numel()]
        _finish(self._group._allgather_base(received, x.view(-1), self._allgather))
        parts = received.view(self._ranks, *x.shape)
        torch.add(parts[0], parts[1], out=x)
        for other in parts[2:]:
            x.add_(other)

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        """Gathers as RankLink.gather. Every rank pads its part to the width of the widest one."""
        rows, widest = len(x), len(columns[0])
        sent = x
        if x.shape[1] < widest:
            sent = self._padded[: rows * widest].view(rows, widest)
            sent[:, : x.shape[1]] = x
        if whole is None:
            _finish(self._group.gather([], [sent], self._gather))
            return
        parts = self._gathered[: self._ranks * rows * widest].view(self._ranks, rows, widest)
        _finish(self._group.gather([list(parts)], [sent], self._gather))
        for part_of_rank, place in zip(parts, columns, strict=True):
            whole[:, place.start : place.stop] = part_of_rank[:, : len(place)]

    def broadcast(self, x: Tensor) -> None:
        """Overwrites x on every rank with the x of tensor rank 0."""
        _finish(self._group.broadcast([x], self._broadcast))


def _finish(work: Any) -> None:
    """Orders everything launched from here on after `work`."""
    if work is not None:  # None: `work` runs on the current stream already
        work.wait()
