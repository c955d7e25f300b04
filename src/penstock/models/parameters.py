"""The parameters of one layer, taken out of a model's."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.kernels import Kernels


@dataclass(frozen=True)
class LayerParameters:
    """The parameters named `{prefix}*`. Each method removes what it returns from `all`, so that no matrix is in memory
    twice: as it was read and as the kernels pack it."""

    all: MutableMapping[str, Any]
    prefix: str
    kernels: Kernels

    def vector(self, name: str) -> Tensor:
        vector: Tensor = self.all.pop(f"{self.prefix}{name}.weight")
        return vector

    def matrix(self, name: str, *, gated: bool = False) -> Any:
        """The packed weight `name`, with its bias if there is one."""
        bias = self.all.pop(f"{self.prefix}{name}.bias", None)
        return self.kernels.linear.pack(self.all.pop(f"{self.prefix}{name}.weight"), bias, gated=gated)

    def experts(self, name: str, count: int, *, gated: bool = False) -> Any:
        """The packed weights of `count` experts, stacked."""
        return self.kernels.experts.pack(self.all.pop(f"{self.prefix}{name}.weight"), count, gated=gated)
