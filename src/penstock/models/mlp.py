"""Implements the part of a layer after attention: an MLP, gated or not, or a mixture of experts."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.families import LayerSpec, MoESpec
from penstock.kernels import Experts, Scoring, SharedExpertOutput
from penstock.models.parameters import LayerParameters
from penstock.models.product import Product


@dataclass(frozen=True)
class MLP:
    activation: str
    up: Product  # of the gate too, if it is gated
    down: Product
    scale: float  # of the output

    @property
    def nbytes(self) -> int:
        return self.up.nbytes + self.down.nbytes

    @property
    def input_product(self) -> Product:
        return self.up

    def __call__(self, x: Any, residual: Tensor | None = None) -> Tensor:
        """Returns the output [tokens, hidden] for normed hidden states x [tokens, hidden], plus the residual if
        given."""
        return self.down(self.up.activated(x, self.activation), residual, scale=self.scale)


@dataclass(frozen=True)
class Mixture:
    spec: MoESpec
    activation: str
    scoring: Scoring
    experts: Experts
    router: Product
    choice_bias: Tensor | None  # fp32 [experts]
    expert_scales: Tensor | None  # fp32 [experts]
    gate_up: Any  # of all experts, as `experts` packed it; the up projection alone if they are not gated
    down: Any  # of all experts
    shared: MLP | None
    shared_gate: Product | None
    inputs: Product | None  # makes the experts' inputs of hidden states
    outputs: Product | None  # makes hidden states of the experts' outputs

    @property
    def nbytes(self) -> int:
        parts = (self.router, self.gate_up, self.down, self.shared, self.shared_gate, self.inputs, self.outputs)
        vectors = (self.choice_bias, self.expert_scales)
        return sum(part.nbytes for part in (*parts, *vectors) if part is not None)

    @property
    def input_product(self) -> None:
        """Returns None, because the router and the experts read the input."""
        return None

    def __call__(self, x: Tensor, residual: Tensor | None = None, routed_by: Tensor | None = None) -> Tensor:
        """Returns the output as `MLP.__call__` does. The router reads `routed_by` [tokens, hidden], or without it x."""
        spec, experts = self.spec, self.experts
        routing = experts.route(
            self.router.logits(x if routed_by is None else routed_by),
            spec.experts_per_token,
            normalize=spec.normalize,
            scoring=self.scoring,
            bias=self.choice_bias,
            scales=self.expert_scales,
        )
        if self.inputs is not None and self.outputs is not None:
            beside = residual if self.shared is None else self.shared(x, residual)
            narrow = experts(self.inputs(x), routing, self.gate_up, self.down, self.activation)
            return self.outputs(narrow, beside)
        shared = None
        if self.shared is not None:
            gate = None if self.shared_gate is None else self.shared_gate.logits(x)
            shared = SharedExpertOutput(self.shared(x), gate)
        return experts(
            x,
            routing,
            self.gate_up,
            self.down,
            self.activation,
            first=spec.first_expert,
            shared=shared,
            residual=residual,
            weigh_inputs=spec.weigh_inputs,
        )


def make_mlp(spec: LayerSpec, parameters: LayerParameters, scale: float) -> MLP | Mixture:
    """Returns a layer's MLP, or the mixture that it has instead, made from the parameters that LayerSpec and MoESpec
    list. `scale` is that of the output."""
    if spec.moe is None or spec.moe.beside_mlp:
        return _mlp("", spec, parameters, scale)
    return make_mixture(spec, spec.moe, parameters, scale)


def _mlp(name: str, spec: LayerSpec, parameters: LayerParameters, scale: float) -> MLP:
    up = parameters.matrix(f"{name}gate_up" if spec.gated else f"{name}up", gated=spec.gated)
    return MLP(spec.activation, up, parameters.matrix(f"{name}down"), scale)


def make_mixture(spec: LayerSpec, moe: MoESpec, parameters: LayerParameters, scale: float) -> Mixture:
    """Returns a layer's mixture `moe`."""
    return Mixture(
        moe,
        spec.activation,
        Scoring(moe.sigmoid, moe.groups, moe.kept_groups, moe.by_pairs, moe.weight_scale * scale),
        parameters.kernels.experts,
        parameters.matrix("router"),
        parameters.vector("choice", "bias") if moe.choice_bias else None,
        parameters.vector("expert_scales") if moe.beside_mlp else None,
        parameters.experts("experts.gate_up" if spec.gated else "experts.up", moe.held, gated=spec.gated),
        parameters.experts("experts.down", moe.held),
        _mlp("shared.", spec, parameters, scale) if moe.shared_intermediate_size else None,
        parameters.matrix("shared.gate") if moe.shared_gate else None,
        parameters.matrix("experts_in") if moe.experts_hidden else None,
        parameters.matrix("experts_out") if moe.experts_hidden else None,
    )
