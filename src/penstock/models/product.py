"""A weight, and the ops that multiply with it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import Kernels
from penstock.kernels.elementwise import RmsNorm


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer: multiplies rows with a weight [out, in] that it owns, and adds the weight's bias if there is one.

    Models call a Product and never `kernels.linear`, so only this class depends on how a weight is packed. Each method
    launches one op, which a recorded step or a CUDA graph can capture.

    The product of an adapter (LoRA) would be added here, too: in `__call__` and `logits` to the result. `activated`
    would have to multiply, add and then activate in separate ops, since its op includes the activation.
    """

    kernels: Kernels
    weight: Any  # packed, as `Linear.pack` returned it
    gated: bool = False  # the weight has two halves: a gate, and the part that is multiplied by it
    name: str = ""  # labels its ops in a profile

    @classmethod
    def pack(
        cls, kernels: Kernels, weight: Any, bias: Tensor | None = None, *, gated: bool = False, name: str = ""
    ) -> "Product":
        """Returns a Product with this weight. Packs the weight, unless it was packed while it was loaded."""
        return cls(kernels, kernels.linear.pack(weight, bias, gated=gated), gated, name)

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)

    @property
    def rms_norm(self) -> RmsNorm:
        """Returns the `rms_norm` for inputs that only this product reads. Its output may be quantised as the weight
        requires."""
        return self.kernels.norm_before(self.weight)

    @property
    def _named(self) -> Kernels:
        """The kernels, which will label the next op with this product's name."""
        if self.kernels.session is not None:
            self.kernels.session.product = self.name
        return self.kernels

    def __call__(self, x: Any, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Returns x [tokens, in] times the weight, [tokens, out], times `scale`, plus a residual of that shape."""
        return self._named.linear(x, self.weight, residual, scale=scale)

    def activated(self, x: Any, activation: str) -> Any:
        """Returns activation(gate) * other half [tokens, out / 2] if the weight is gated, else activation(product)
        [tokens, out]. The result may be quantised, as another product with a weight of the same format reads it."""
        linear = self._named.linear
        return (linear.gated if self.gated else linear.activated)(x, self.weight, activation)

    def by_head(self, x: Tensor, heads: int) -> Tensor:
        """Multiplies each head's part of x [tokens, heads * in] with the head's rows of the weight [heads * out, in].
        Returns [tokens, heads * out]."""
        return self._named.linear_by_head(x, self.weight, heads)

    def logits(self, x: Any, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """Returns fp32 logits [tokens, out] times `scale`, then bounded by `softcap` (0: not bounded)."""
        return self._named.linear.logits(x, self.weight, scale=scale, softcap=softcap)

    def rows(self, ids: Tensor, scale: float, dtype: torch.dtype, *, first: int | None = None) -> Tensor:
        """Returns the weight's rows for int64 ids [tokens], times `scale`. `first` is as for `Linear.rows`."""
        return self.kernels.linear.rows(ids, self.weight, scale, dtype, first=first)
