"""Takes the parameters of one layer out of a model's parameters, and makes products of its matrices."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import ModelSpec
from penstock.kernels import Kernels
from penstock.models.norm import Norm
from penstock.models.product import Product


@dataclass(frozen=True)
class LayerParameters:
    """Takes out the parameters whose names begin with `prefix`. Each method removes what it returns from `all`, so that
    no matrix is in memory both unpacked and packed."""

    all: MutableMapping[str, Any]
    prefix: str
    kernels: Kernels

    def vector(self, name: str, kind: str = "weight") -> Tensor:
        vector: Tensor = self.all.pop(f"{self.prefix}{name}.{kind}")
        return vector

    def ones(self, *shape: int) -> Tensor:
        """Returns ones, of the dtype and on the device of the layer's vectors."""
        vector: Tensor = self.all[f"{self.prefix}mlp_norm.weight"]
        return vector.new_ones(shape)

    def norm(self, name: str, model: ModelSpec) -> Norm:
        bias = self.all.pop(f"{self.prefix}{name}.bias", None)
        return Norm(self.vector(name), bias, model.norm_eps, model.norm_offset, model.layer_norm)

    def matrix(self, name: str, *, gated: bool = False, label: str = "") -> Product:
        """Returns the product with the weight `name`, and with its bias if there is one. `label` is its name in
        profiles, if another one."""
        weight, bias = self.all.pop(f"{self.prefix}{name}.weight"), self.all.pop(f"{self.prefix}{name}.bias", None)
        return Product.pack(self.kernels, weight, bias, gated=gated, name=label or name)

    def experts(self, name: str, count: int, *, gated: bool = False) -> Any:
        """Returns the packed weights of `count` experts, stacked, with their biases if there are any."""
        bias = self.all.pop(f"{self.prefix}{name}.bias", None)
        return self.kernels.experts.pack(self.all.pop(f"{self.prefix}{name}.weight"), count, bias, gated=gated)
