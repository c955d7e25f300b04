"""A product: a weight, and the ops that multiply with it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.kernels import Kernels
from penstock.kernels.elementwise import RmsNorm


@dataclass(frozen=True, slots=True)
class Product:
    """Multiplies rows with a weight [out, in] that it owns, and adds the weight's bias if there is one.

    Models call a product and never the kernels' linear, so how a weight is packed is decided here alone. What an
    adapter (LoRA) adds to a product belongs here too. In `__call__` and `logits` it joins the result. In `activated`
    it must be added before the activation, which is part of the kernels' op: a product with an addition multiplies
    without it, adds, and then activates. Each method launches one op, which a recorded step or a CUDA graph captures.
    """

    kernels: Kernels
    weight: Any  # as `Linear.pack` of the kernels returned it
    gated: bool = False  # the weight is the gate, and what it gates

    @classmethod
    def pack(cls, kernels: Kernels, weight: Any, bias: Tensor | None = None, *, gated: bool = False) -> "Product":
        """Returns the product with a weight, which is packed if it was not packed while it was read."""
        return cls(kernels, kernels.linear.pack(weight, bias, gated=gated), gated)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the weight and its bias."""
        return int(self.weight.nbytes)

    @property
    def rms_norm(self) -> RmsNorm:
        """Returns `rms_norm` for rows that this product alone reads: they may come quantised, as its weight needs
        them."""
        return self.kernels.norm_before(self.weight)

    def __call__(self, x: Any, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Returns x [tokens, in] times the weight, [tokens, out], times `scale`, plus a residual of that shape."""
        return self.kernels.linear(x, self.weight, residual, scale=scale)

    def activated(self, x: Any, activation: str) -> Any:
        """Returns activation(gate) * the other half [tokens, out / 2] if the weight is gated, else each value
        activated [tokens, out]. The rows may come quantised, as another product with such a weight reads them."""
        linear = self.kernels.linear
        return (linear.gated if self.gated else linear.activated)(x, self.weight, activation)

    def by_head(self, x: Tensor, heads: int) -> Tensor:
        """Returns each head's part of x [tokens, heads * in] times its own rows of the weight [heads * out, in], as
        [tokens, heads * out]."""
        return self.kernels.linear_by_head(x, self.weight, heads)

    def logits(self, x: Any, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        """Returns fp32 logits [tokens, out] times `scale`, then bounded by `softcap` (0: not)."""
        return self.kernels.linear.logits(x, self.weight, scale=scale, softcap=softcap)

    def rows(self, ids: Tensor, scale: float, dtype: torch.dtype, *, first: int | None = None) -> Tensor:
        """Returns the weight's rows for int64 ids [tokens], times `scale`. `first` is as for `Linear.rows`."""
        return self.kernels.linear.rows(ids, self.weight, scale, dtype, first=first)
