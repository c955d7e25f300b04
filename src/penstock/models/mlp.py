"""Implements the part of a layer after attention: a gated MLP, or a mixture of experts."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import LayerSpec, MoESpec
from penstock.kernels import Kernels, SharedExpertOutput
from penstock.models.parameters import LayerParameters


@dataclass(frozen=True)
class MLP:
    """Computes a gated MLP. The kernels packed the matrices."""

    activation: str
    gate_up: Any
    down: Any

    @property
    def nbytes(self) -> int:
        return int(self.gate_up.nbytes + self.down.nbytes)

    @property
    def input_weight(self) -> Any:
        """Returns the packed weight that multiplies the input."""
        return self.gate_up

    def __call__(self, kernels: Kernels, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the output [tokens, hidden] for normed hidden states x [tokens, hidden], plus the residual if
        given."""
        return kernels.linear(kernels.linear.gated(x, self.gate_up, self.activation), self.down, residual)


@dataclass(frozen=True)
class Mixture:
    """Computes a mixture of experts."""

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
    def input_weight(self) -> None:
        """Returns None, because several weights multiply the input: the router's and the experts'."""
        return None

    def __call__(self, kernels: Kernels, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns the output as `MLP.__call__` does."""
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


def make_mlp(spec: LayerSpec, parameters: LayerParameters) -> MLP | Mixture:
    """Returns a layer's MLP, made from its parameters `gate_up` and `down`, or its mixture, made from those that
    MoESpec lists."""
    moe = spec.moe

    def mlp(name: str) -> MLP:
        return MLP(spec.activation, parameters.matrix(f"{name}gate_up", gated=True), parameters.matrix(f"{name}down"))

    if moe is None:
        return mlp("")
    return Mixture(
        moe,
        spec.activation,
        parameters.matrix("router"),
        parameters.experts("experts.gate_up", moe.held, gated=True),
        parameters.experts("experts.down", moe.held),
        mlp("shared.") if moe.shared_intermediate_size else None,
        parameters.matrix("shared.gate") if moe.shared_gate else None,
    )
