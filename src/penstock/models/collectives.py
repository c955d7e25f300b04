"""The collective operations that a model needs of the ranks that share its layers. The runtime's Mesh has them."""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """Operations of the tensor ranks of one stage. All ranks make the same calls in the same order."""

    def sum(self, x: Tensor) -> None:
        """Replace x [rows, width] on every rank by the sum of the ranks' x, added in rank order."""
        ...

    def gather(self, x: Tensor, total: int) -> Tensor | None:
        """The ranks' x [rows, their part of `total` columns] side by side: [rows, total] on the first rank, None on
        the others. A rank's part is what `config.split.part` gives it."""
        ...
