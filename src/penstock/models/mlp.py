"""What follows attention in a layer: a gated MLP, or a mixture of them."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import LayerSpec, MoESpec
from penstock.kernels import Kernels, SharedExpertOutput


@dataclass(frozen=True)
class MLP:
    """A gated MLP; the matrices are as the kernels packed them."""

    activation: str
    gate_up: Any
    down: Any

    @property
    def nbytes(self) -> int:
        return int(self.gate_up.nbytes + self.down.nbytes)

    @property
    def only_reader(self) -> Any:
        """The weight that alone is multiplied with what the block is given."""
        return self.gate_up

    def __call__(self, kernels: Kernels, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normed hidden states [tokens, hidden] to what the block gives, plus a residual."""
        return kernels.linear(kernels.linear.gated(x, self.gate_up, self.activation), self.down, residual)


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts, in the place of an MLP."""

    spec: MoESpec
    activation: str
    router: Any
    gate_up: Any  # of all experts
    down: Any  # of all experts
    shared: MLP | None
    shared_gate: Any | None

    @property
    def nbytes(self) -> int:
        parts = (self.router, self.gate_up, self.down, self.shared, self.shared_gate)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def only_reader(self) -> None:
        """As of an MLP: there are a router and experts here."""
        return None

    def __call__(self, kernels: Kernels, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As of an MLP."""
        linear, spec = kernels.linear, self.spec
        routing = kernels.experts.route(linear.logits(x, self.router), spec.experts_per_token, normalize=spec.normalize)
        shared = None
        if self.shared is not None:
            gate = None if self.shared_gate is None else linear.logits(x, self.shared_gate)
            shared = SharedExpertOutput(self.shared(kernels, x), gate)
        return kernels.experts(
            x,
            routing,
            self.gate_up,
            self.down,
            self.activation,
            first=spec.first_expert,
            shared=shared,
            residual=residual,
        )


def pack_mlp(spec: LayerSpec, prefix: str, parameters: MutableMapping[str, Any], kernels: Kernels) -> MLP | Mixture:
    """A layer's parameters `{prefix}gate_up` and `{prefix}down`, or those of its mixture, taken out of the mapping."""
    linear, moe = kernels.linear, spec.moe

    def packed(name: str, *, gated: bool = False) -> Any:
        weight = parameters.pop(f"{prefix}{name}.weight")
        return linear.pack(weight, parameters.pop(f"{prefix}{name}.bias", None), gated=gated)

    def mlp(name: str) -> MLP:
        return MLP(spec.activation, packed(f"{name}gate_up", gated=True), packed(f"{name}down"))

    if moe is None:
        return mlp("")
    stacks = (
        kernels.experts.pack(parameters.pop(f"{prefix}experts.{name}.weight"), moe.held, gated=name == "gate_up")
        for name in ("gate_up", "down")
    )
    return Mixture(
        moe,
        spec.activation,
        packed("router"),
        *stacks,
        mlp("shared.") if moe.shared_intermediate_size else None,
        packed("shared.gate") if moe.shared_gate else None,
    )
