"""Implements a mixture of experts beside a layer's MLP (see LayerSpec)."""

from dataclasses import dataclass, replace

from torch import Tensor

from penstock.families import LayerSpec, ModelSpec
from penstock.kernels import Kernels
from penstock.models.mlp import Mixture, make_mixture
from penstock.models.norm import Norm
from penstock.models.parameters import LayerParameters


@dataclass(frozen=True)
class ExpertsBeside:
    """Computes a mixture whose router and experts each have a norm of the residual. The block norms what it returns by
    `post_norm`, and the MLP's output by `dense_post_norm`."""

    mixture: Mixture
    router_norm: Norm
    norm: Norm
    post_norm: Norm
    dense_post_norm: Norm

    @classmethod
    def make(cls, spec: LayerSpec, parameters: LayerParameters, model: ModelSpec) -> "ExpertsBeside | None":
        if spec.moe is None or not spec.moe.beside_mlp:
            return None
        names = ("router_norm", "experts_norm", "experts_post_norm", "dense_post_norm")
        router_norm, *norms = (parameters.norm(name, model) for name in names)
        router_norm = replace(router_norm, weight=router_norm.weight * model.hidden_size**-0.5)
        return cls(make_mixture(spec, spec.moe, parameters, model.residual_scale), router_norm, *norms)

    @property
    def nbytes(self) -> int:
        norms = (self.router_norm, self.norm, self.post_norm, self.dense_post_norm)
        return self.mixture.nbytes + sum(norm.nbytes for norm in norms)

    def __call__(self, kernels: Kernels, hidden: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the output of the experts [rows, hidden] for the residual stream `hidden`, plus `residual` if it is
        given."""
        routed_by, _ = self.router_norm(kernels, hidden)
        normed, _ = self.norm(kernels, hidden)
        return self.mixture(normed, residual, routed_by)
