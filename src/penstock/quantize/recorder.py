"""Runs a layer's products in torch, and collects the inputs of one of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.linear import DenseWeight, TorchLinear


class Enough(Exception):
    """The product that is recorded has been reached: the rest of the layer is not needed."""


class RecordingLinear:
    """Provides Linear (kernels/linear.py) by torch. Before a product is computed, `watch` is called with the address of
    the weight's first value and with x [tokens, in]."""

    def __init__(self) -> None:
        self._linear = TorchLinear()
        self.watch: Callable[[int, Tensor], None] | None = None

    def pack(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> DenseWeight:
        return self._linear.pack(weight, bias, gated=gated)

    def __call__(self, x: Tensor, weight: DenseWeight, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        self._watched(x, weight)
        return self._linear(x, weight, residual, scale=scale)

    def gated(self, x: Tensor, weight: DenseWeight, activation: str) -> Tensor:
        self._watched(x, weight)
        return self._linear.gated(x, weight, activation)

    def activated(self, x: Tensor, weight: DenseWeight, activation: str) -> Tensor:
        self._watched(x, weight)
        return self._linear.activated(x, weight, activation)

    def logits(self, x: Tensor, weight: DenseWeight, *, scale: float = 1.0, softcap: float = 0.0) -> Tensor:
        self._watched(x, weight)
        return self._linear.logits(x, weight, scale=scale, softcap=softcap)

    def rows(
        self, token_ids: Tensor, weight: DenseWeight, scale: float, dtype: torch.dtype, *, first: int | None = None
    ) -> Tensor:
        return self._linear.rows(token_ids, weight, scale, dtype, first=first)

    def _watched(self, x: Tensor, weight: DenseWeight) -> None:
        if self.watch is not None:
            self.watch(weight.weight.data_ptr(), x)


class WeightPlaces:
    """Finds which parameter a product's weight belongs to, and from which row on, by its address in memory."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._matrices = {name: each for name, each in parameters.items() if each.dim() == 2}

    def find(self, address: int) -> tuple[str, int] | None:
        """Returns (parameter, row), or None for a tensor that is no matrix of the layer."""
        for name, matrix in self._matrices.items():
            offset = address - matrix.data_ptr()
            if 0 <= offset < matrix.nbytes:
                return name, offset // (matrix.shape[1] * matrix.element_size())
        return None
