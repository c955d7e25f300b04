"""Declares the operations between ranks that share a model's layers. The runtime's Mesh implements them."""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Connects the tensor ranks of one stage. All of them must make the same calls in the same order."""

    def sum(self, x: Tensor) -> None:
        """Overwrites x [rows, width] on every rank with the sum of all ranks' x, added in rank order."""

    def gather(self, x: Tensor, total: int) -> Tensor | None:
        """Gathers the columns of all ranks. Returns [rows, total] on tensor rank 0, and None on the others. Each rank's
        x has its part of the `total` columns, as `config.split.part` divides them."""
