"""A mixture of experts in torch: the routing of tokens, and the weighted sum of their experts' outputs."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.linear import Linear
from penstock.kernels.routing import SOFTMAX, Routing, Scoring, SharedExpertOutput


class Experts(Protocol):
    """A provider of mixtures of experts. The matrices of all experts are packed together, once."""

    def pack(self, weight: Any, count: int, bias: Tensor | None = None, *, gated: bool = False) -> Any:
        """Pack a weight [count * out, in] and a bias [count * out], the experts below each other. Each gated one is the
        gate, and below it the projection that it gates. A weight that was packed while it was read (see packers.py) is
        returned as it is, with the bias."""

    def route(
        self,
        logits: Tensor,
        slots: int,
        *,
        normalize: bool,
        scoring: Scoring = SOFTMAX,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Routing:
        """The `slots` largest scores of fp32 logits [tokens, experts], the first among equals. `bias` fp32 [experts] is
        added to scores for the choice alone. With `normalize` the weights are scaled to a sum of 1 before they are
        scaled as `scoring` says, and by `scales` fp32 [experts] of the chosen experts."""

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: Any,
        down: Any,
        activation: str,
        *,
        first: int = 0,
        shared: SharedExpertOutput | None = None,
        residual: Tensor | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        """x [tokens, hidden] to the same shape: the weighted sum of a token's experts in the order of its slots, plus
        the shared expert's output, plus the residual, in fp32. With `weigh_inputs` an expert's input is weighted, not
        its output. The matrices are those of the experts from `first` on; all others give 0. `gate_up` is the up
        projection alone if it was not packed as gated."""


@dataclass(frozen=True)
class ExpertMatrices:
    """The matrices of all experts, each as a provider of Linear packed it."""

    each: tuple[Any, ...]
    gated: bool

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.each)


def route_by_scores(
    logits: Tensor, slots: int, scoring: Scoring, bias: Tensor | None, scales: Tensor | None, *, normalize: bool
) -> Routing:
    """Experts.route for any scoring, in torch."""
    scores = logits.sigmoid() if scoring.sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if scoring.groups > 1:
        grouped = choice.view(len(choice), scoring.groups, choice.shape[1] // scoring.groups)
        best = grouped.topk(2, -1)[0].sum(-1) if scoring.by_pairs else grouped.amax(-1)
        order = best.argsort(dim=-1, descending=True, stable=True)
        out = torch.ones_like(best, dtype=torch.bool).scatter_(1, order[:, : scoring.kept_groups], False)
        choice = grouped.masked_fill(out[:, :, None], -torch.inf).flatten(1)
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, :slots].contiguous()
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * scoring.scale
    return Routing(experts, weights if scales is None else weights * scales[experts])


class TorchExperts:
    """Computes one expert after the other, by a provider of Linear."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def pack(self, weight: Tensor, count: int, bias: Tensor | None = None, *, gated: bool = False) -> ExpertMatrices:
        biases = [None] * count if bias is None else bias.chunk(count)
        each = zip(weight.chunk(count), biases, strict=True)
        return ExpertMatrices(tuple(self._linear.pack(matrix, own, gated=gated) for matrix, own in each), gated)

    def route(
        self,
        logits: Tensor,
        slots: int,
        *,
        normalize: bool,
        scoring: Scoring = SOFTMAX,
        bias: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Routing:
        if scoring != SOFTMAX or bias is not None or scales is not None:
            return route_by_scores(logits, slots, scoring, bias, scales, normalize=normalize)
        experts = logits.argsort(dim=-1, descending=True, stable=True)[:, :slots].contiguous()
        weights = logits.softmax(-1).gather(-1, experts)
        return Routing(experts, weights / weights.sum(-1, keepdim=True) if normalize else weights)

    def __call__(
        self,
        x: Tensor,
        routing: Routing,
        gate_up: ExpertMatrices,
        down: ExpertMatrices,
        activation: str,
        *,
        first: int = 0,
        shared: SharedExpertOutput | None = None,
        residual: Tensor | None = None,
        weigh_inputs: bool = False,
    ) -> Tensor:
        outputs = torch.zeros(*routing.experts.shape, x.shape[1])  # fp32
        multiply = self._linear.gated if gate_up.gated else self._linear.activated
        for expert, matrices in enumerate(zip(gate_up.each, down.each, strict=True), first):
            tokens, slots = (routing.experts == expert).nonzero(as_tuple=True)
            if len(tokens):
                mine = x[tokens]
                if weigh_inputs:
                    mine = (mine.float() * routing.weights[tokens, slots, None]).to(x.dtype)
                inner = multiply(mine, matrices[0], activation)
                outputs[tokens, slots] = self._linear(inner, matrices[1]).float()
        total = torch.zeros(x.shape)
        for output, weights in zip(outputs.unbind(1), routing.weights.unbind(1), strict=True):
            total += output if weigh_inputs else output * weights[:, None]
        if shared is not None:
            total += shared.output.float() * (1.0 if shared.gate is None else shared.gate.sigmoid())
        return (total if residual is None else total + residual.float()).to(x.dtype)
