"""Implements the embedding of its own that a layer may have (see PerLayerSpec)."""

from dataclasses import dataclass

from torch import Tensor

from penstock.families import LayerSpec, ModelSpec
from penstock.kernels import Kernels
from penstock.models.norm import Norm
from penstock.models.parameters import LayerParameters
from penstock.models.product import Product


@dataclass(frozen=True)
class PerLayerInput:
    """Executes a PerLayerSpec."""

    width: int
    activation: str
    table: Product
    projection: Product
    norm: Norm
    gate: Product
    output: Product
    post_norm: Norm

    @classmethod
    def make(cls, spec: LayerSpec, parameters: LayerParameters, model: ModelSpec) -> "PerLayerInput | None":
        if spec.per_layer is None:
            return None
        names = ("table", "projection", "gate", "output")
        table, projection, gate, output = (parameters.matrix(f"per_layer.{name}") for name in names)
        norm, post_norm = (parameters.norm(f"per_layer.{name}", model) for name in ("norm", "post_norm"))
        return cls(spec.per_layer.width, spec.activation, table, projection, norm, gate, output, post_norm)

    @property
    def nbytes(self) -> int:
        parts = (self.table, self.projection, self.norm, self.gate, self.output, self.post_norm)
        return sum(part.nbytes for part in parts)

    def embed(self, kernels: Kernels, token_ids: Tensor, embedded: Tensor) -> Tensor:
        """Returns the layer's input [tokens, width] for the tokens and for the model's embedding of them."""
        rows = self.table.rows(token_ids, self.width**0.5, embedded.dtype)
        projected = self.projection(embedded, scale=embedded.shape[1] ** -0.5)
        normed, _ = self.norm(kernels, projected)
        return self.norm(kernels, normed, rows, scale=2**-0.5)[1]  # the scaled sum; its norm is not used

    def __call__(self, kernels: Kernels, hidden: Tensor, own: Tensor) -> Tensor:
        """Returns what joins the residual [rows, hidden], for what `embed` returned of these rows."""
        gate = self.gate.activated(hidden, self.activation)
        normed: Tensor = self.post_norm(kernels, self.output(kernels.product(gate, own)))[0]
        return normed
