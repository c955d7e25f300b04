"""Implements layers that keep a state of a sequence instead of keys and values."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import ModelSpec, RecurrentSpec
from penstock.kernels import Kernels, RecurrenceWeights
from penstock.models.parameters import LayerParameters
from penstock.models.product import Product


@dataclass(frozen=True)
class RecurrentLayer:
    """Executes a RecurrentSpec."""

    input: Product
    rates: Product
    weights: RecurrenceWeights
    output: Product
    residual_scale: float

    @classmethod
    def make(cls, spec: RecurrentSpec, parameters: LayerParameters, model: ModelSpec) -> "RecurrentLayer":
        weights = RecurrenceWeights(
            conv=parameters.vector("conv").flatten(1).T.contiguous(),
            conv_bias=parameters.vector("conv", "bias") if spec.conv_bias else None,
            decay=-parameters.vector("decay").exp(),
            step_bias=parameters.vector("step", "bias"),
            skip=None if spec.delta else parameters.vector("skip"),
            norm=parameters.vector("state_norm"),
            key_heads=spec.key_heads,
            key_dim=spec.key_dim,
            norm_width=spec.value_width // spec.norm_groups,
            eps=model.norm_eps,
            tiled=spec.tiled,
        )
        matrix = parameters.matrix
        return cls(matrix("input"), matrix("rates"), weights, matrix("output"), model.residual_scale)

    @property
    def nbytes(self) -> int:
        return int(self.input.nbytes + self.rates.nbytes + self.weights.nbytes + self.output.nbytes)

    @property
    def input_product(self) -> None:
        """Returns None: two products read the input."""
        return None

    def attend(self, kernels: Kernels, x: Tensor, rotation: None, group: Any, cache: Any) -> Tensor:
        (states,) = cache.planes
        inputs, rates = self.input(x), self.rates.logits(x)
        return kernels.recurrence(inputs, rates, group.attention, states, self.weights)

    def project(self, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.output(attended, residual, scale=self.residual_scale)
