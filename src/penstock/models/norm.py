"""Norms of hidden states: RMSNorm or LayerNorm, as the model's spec says."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels import Kernels
from penstock.models.product import Product


@dataclass(frozen=True)
class Norm:
    """Computes a norm of hidden states [tokens, hidden]."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float
    centered: bool  # LayerNorm

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(
        self,
        kernels: Kernels,
        x: Tensor,
        addend: Tensor | None = None,
        *,
        before: Product | None = None,
        scale: float = 1.0,
    ) -> tuple[Any, Tensor]:
        """Returns (the norm of the sum, the sum). The sum is (x + addend) * scale, or x without an addend. `before` is
        the only product that reads the norm: if it takes quantised rows, the norm comes quantised."""
        if self.centered:
            return kernels.layer_norm(x, addend, self.weight, self.bias, self.eps)
        norm = kernels.rms_norm if before is None else before.rms_norm
        if scale == 1.0:
            return norm(x, addend, self.weight, self.eps, self.offset)
        return norm(x, addend, self.weight, self.eps, self.offset, scale)
