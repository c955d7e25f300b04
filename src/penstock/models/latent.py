"""Implements latent attention: see families/kinds/latent.py."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import LatentSpec, ModelSpec
from penstock.kernels import Kernels
from penstock.models.parameters import LayerParameters

NORM_EPS = 1e-6  # of the norms within attention; the model's own may differ


@dataclass(frozen=True)
class LatentLayer:
    """Executes a LatentSpec."""

    spec: LatentSpec
    query_down: Any | None
    query_norm: Tensor | None
    query: Any
    query_rope: Any
    latent: Any
    latent_norm: Tensor
    key_rope: Any
    key_up: Any
    value_up: Any
    output: Any
    residual_scale: float

    @classmethod
    def make(cls, spec: LatentSpec, parameters: LayerParameters, model: ModelSpec) -> "LatentLayer":
        matrix, vector, down = parameters.matrix, parameters.vector, spec.query_rank > 0
        return cls(
            spec,
            query_down=matrix("query_down") if down else None,
            query_norm=vector("query_norm") if down else None,
            query=matrix("query"),
            query_rope=matrix("query_rope"),
            latent=matrix("latent"),
            latent_norm=vector("latent_norm"),
            key_rope=matrix("key_rope"),
            key_up=matrix("key_up"),
            value_up=matrix("value_up"),
            output=matrix("output"),
            residual_scale=model.residual_scale,
        )

    @property
    def nbytes(self) -> int:
        matrices = self.query, self.query_rope, self.latent, self.key_rope, self.key_up, self.value_up, self.output
        others = self.query_down, self.query_norm, self.latent_norm
        return sum(int(each.nbytes) for each in (*matrices, *others) if each is not None)

    @property
    def input_weight(self) -> None:
        """Returns None: several weights multiply the input."""
        return None

    def attend(self, kernels: Kernels, x: Tensor, rotation: Any, group: Any, cache: Any) -> Tensor:
        """Returns what the heads attend to, as latents [tokens, heads * rank]."""
        (pages,), heads = cache.planes, self.spec.num_heads
        latent, _ = kernels.rms_norm(kernels.linear(x, self.latent), None, self.latent_norm, NORM_EPS, 0.0)
        key = kernels.linear(x, self.key_rope)
        if self.query_down is not None and self.query_norm is not None:
            x, _ = kernels.rms_norm(kernels.linear(x, self.query_down), None, self.query_norm, NORM_EPS, 0.0)
        absorbed = kernels.linear_by_head(kernels.linear(x, self.query), self.key_up, heads)
        query = kernels.latent_attention.store_latents(
            absorbed, kernels.linear(x, self.query_rope), latent, key, rotation, pages, group.blocks, group.offsets
        )
        return kernels.latent_attention.over_latents(query, pages, group.attention, self.spec.scale, self.spec.rank)

    def project(self, kernels: Kernels, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        values = kernels.linear_by_head(attended, self.value_up, self.spec.num_heads)
        return kernels.linear(values, self.output, residual, scale=self.residual_scale)
