"""What tensor ranks on devices exchange: launched in the order of a device's work, as every kernel is.

Over NCCL the host waits for nothing here. A rank that does not come holds up the devices of the others: nobody raises,
and it is the engine that sees no result come and says so (see engine/ranks/supervision.py). Over gloo, which stands in
for NCCL where there is no GPU, everything is done when a call returns.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, GatherOptions

from penstock.config.split import part


class ExchangeLimits(NamedTuple):
    """The most that ranks on devices exchange. Memory for it is taken once, so that captured steps can hold it."""

    where: torch.device
    tokens: int  # of a step,
    hidden: int  # and the width of their hidden states
    dtype: torch.dtype
    rows: int  # of logits,
    vocabulary: int  # and their width
    ordered: bool  # whether sums are in rank order: else in whichever order is fastest


class DeviceLink:
    """A Link over a process group."""

    def __init__(self, group: Any, rank: int, ranks: int, limits: ExchangeLimits) -> None:
        self._group, self._rank, self._ranks = group, rank, ranks
        # What is not asynchronous goes to the device's current stream, between the kernels around it.
        self._reduce, self._exchange, self._collect, self._spread = (
            AllreduceOptions(),
            AllgatherOptions(),
            GatherOptions(),
            BroadcastOptions(),
        )
        for options in (self._reduce, self._exchange, self._collect, self._spread):
            options.asyncOp = False

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=limits.where)

        self._parts = empty(ranks * limits.tokens * limits.hidden, limits.dtype) if limits.ordered else None
        widest = len(part(limits.vocabulary, ranks, 0))
        self._padded = empty(limits.rows * widest, torch.float32)
        self._gathered = empty(ranks * limits.rows * widest if rank == 0 else 0, torch.float32)

    def sum(self, x: Tensor) -> None:
        """In rank order every rank gets all parts whole, and adds them by itself: the order of a reduction of the
        transport's depends on how many numbers there are."""
        if self._parts is None:
            _finish(self._group.allreduce([x], self._reduce))
            return
        received = self._parts[: self._ranks * x.numel()]
        _finish(self._group._allgather_base(received, x.view(-1), self._exchange))
        parts = received.view(self._ranks, *x.shape)
        torch.add(parts[0], parts[1], out=x)
        for other in parts[2:]:
            x.add_(other)

    def gather(self, x: Tensor, whole: Tensor | None, columns: Sequence[range]) -> None:
        """Parts travel at the width of the widest."""
        rows, widest = len(x), len(columns[0])
        sent = x
        if x.shape[1] < widest:
            sent = self._padded[: rows * widest].view(rows, widest)
            sent[:, : x.shape[1]] = x
        if whole is None:
            _finish(self._group.gather([], [sent], self._collect))
            return
        parts = self._gathered[: self._ranks * rows * widest].view(self._ranks, rows, widest)
        _finish(self._group.gather([list(parts)], [sent], self._collect))
        for theirs, place in zip(parts, columns, strict=True):
            whole[:, place.start : place.stop] = theirs[:, : len(place)]

    def share(self, x: Tensor) -> None:
        """The first rank's x in the place of each."""
        _finish(self._group.broadcast([x], self._spread))


def _finish(work: Any) -> None:
    """Whatever is launched after this comes after `work`."""
    if work is not None:  # it went to the current stream
        work.wait()
