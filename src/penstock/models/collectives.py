"""What the ranks that share a layer do together, as a model asks for it. The mesh of the runtime does it."""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The tensor ranks of one stage. All of them call the same, in the same order."""

    def sum(self, x: Tensor) -> None:
        """The ranks' x [rows, width], all of one shape, added in rank order, in the place of each of them."""
        ...

    def gather(self, x: Tensor, total: int) -> Tensor | None:
        """The ranks' x [rows, their part of `total` columns] side by side: [rows, total] on the first rank, None on
        the others. A rank's part is what `config.split.part` gives it."""
        ...
