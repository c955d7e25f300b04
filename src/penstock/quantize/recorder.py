"""Runs a layer's products in torch, and collects the inputs of one of them."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.families.spec import Parameter
from penstock.kernels.linear import DenseWeight, TorchLinear


class _Enough(Exception):
    """The product that is recorded has been reached: the rest of the layer is not needed."""


class RoundingLinear(TorchLinear):
    """Products of x and weights in bf16, as fp32: for a processor that multiplies bf16 faster."""

    def __call__(self, x: Tensor, weight: DenseWeight, residual: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        product = F.linear(x.bfloat16(), weight.weight.bfloat16()).float()
        if weight.bias is not None:
            product += weight.bias
        if scale != 1.0:
            product *= scale
        return product if residual is None else product.add_(residual)


class RecordingLinear(threading.local):
    """Provides Linear (kernels/linear.py) by torch. Before a product is computed, a function that watches is called
    with the address of the weight's first value and with x [tokens, in]. Each thread has its own."""

    def __init__(self, linear: TorchLinear) -> None:
        self._linear = linear
        self._watch: Callable[[int, Tensor], None] | None = None

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

    def inputs(
        self, places: "WeightPlaces", parameter: Parameter, experts: range, run: Callable[[], object]
    ) -> list[tuple[int, Tensor]]:
        """Calls `run`, which executes a layer, and stops it when it needs the product of a parameter. Returns what each
        call of the product read: (the first row of its weight, x). For a parameter of experts it is not stopped, and
        only the calls of `experts` are returned."""
        found, size = list[tuple[int, Tensor]](), parameter.shape[0] // parameter.experts

        def watch(address: int, x: Tensor) -> None:
            place = places.find(address)
            if place is None or place[0] != parameter.name or place[1] // size not in experts:
                return
            found.append((place[1], x))
            if parameter.experts == 1:
                raise _Enough

        with self.watched_by(watch), suppress(_Enough):
            run()
        return found

    @contextmanager
    def watched_by(self, watch: Callable[[int, Tensor], None]) -> Iterator[None]:
        """Calls `watch` for the products of this thread."""
        self._watch = watch
        try:
            yield
        finally:
            self._watch = None

    def _watched(self, x: Tensor, weight: DenseWeight) -> None:
        if self._watch is not None:
            self._watch(weight.weight.data_ptr(), x)


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
