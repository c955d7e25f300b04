"""Implements latent attention: see families/kinds/latent.py."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import LatentSpec, ModelSpec
from penstock.kernels import Kernels
from penstock.models.parameters import LayerParameters
from penstock.models.product import Product

NORM_EPS = 1e-6  # of the norms within attention; the model's own may differ


@dataclass(frozen=True)
class LatentLayer:
    """Executes a LatentSpec."""

    spec: LatentSpec
    query_down: Product | None
    query_norm: Tensor | None
    query: Product
    query_rope: Product
    latent: Product
    latent_norm: Tensor
    key_rope: Product
    key_up: Product
    value_up: Product
    output: Product
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
            latent=matrix("latent", label="latents"),
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
    def input_product(self) -> None:
        """Returns None: several products read the input."""
        return None

    def attend(self, kernels: Kernels, x: Tensor, rotation: Any, group: Any, cache: Any) -> Tensor:
        """Returns what the heads attend to, as latents [tokens, heads * rank]."""
        (pages,), heads = cache.planes, self.spec.num_heads
        latent, _ = kernels.rms_norm(self.latent(x), None, self.latent_norm, NORM_EPS, 0.0)
        key = self.key_rope(x)
        if self.query_down is not None and self.query_norm is not None:
            x, _ = kernels.rms_norm(self.query_down(x), None, self.query_norm, NORM_EPS, 0.0)
        absorbed = self.key_up.by_head(self.query(x), heads)
        query = kernels.latent_attention.store_latents(
            absorbed, self.query_rope(x), latent, key, rotation, pages, group.blocks, group.offsets
        )
        return kernels.latent_attention.over_latents(query, pages, group.attention, self.spec.scale, self.spec.rank)

    def project(self, attended: Tensor, residual: Tensor | None = None) -> Tensor:
        values = self.value_up.by_head(attended, self.spec.num_heads)
        return self.output(values, residual, scale=self.residual_scale)
