"""A mixture of experts in torch: the routing of tokens, and the weighted sum of their experts' outputs."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.kernels.linear import Linear, TorchLinear
from penstock.kernels.registry import normals
from penstock.kernels.routing import SOFTMAX, Routing, Scoring, SharedExpertOutput


class Experts(Protocol):
    """A provider of mixtures of experts. The matrices of all experts are packed together, once."""

    def pack(self, weight: Any, count: int, bias: Tensor | None = None, *, gated: bool = False) -> Any:
        """Pack a weight [count * out, in] and a bias [count * out], the experts below each other. Each gated one is the
        gate, and below it the projection that it gates. A weight that was packed while it was read (see packers.py) is
        returned as it is, with the bias."""
        ...

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
        ...

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
        ...


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


def route_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """(logits, slots, normalize, scoring, bias, scales). Rounded logits have many ties."""
    normal = normals(torch.float32, seed)
    for tokens in (0, 1, 3, 70):
        for experts, slots in ((5, 2), (8, 8), (17, 1), (128, 8)):
            yield normal(tokens, experts) * 3, slots, experts % 2 == 0, SOFTMAX, None, None
            yield normal(tokens, experts).round(), slots, experts % 2 == 1, SOFTMAX, None, normal(experts)
        for scoring in (Scoring(sigmoid=True, scale=2.5), Scoring(True, 4, 2, True), Scoring(False, 6, 3, scale=1.5)):
            bias = normal(24) if scoring.sigmoid else None
            yield normal(tokens, 24), 4, scoring.sigmoid, scoring, bias, None


def experts_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """(x, routing, count, gate_up, down, biases, activation, first, shared, residual, weigh_inputs)."""
    normal, floats = normals(dtype, seed), normals(torch.float32, seed + 1)
    route = TorchExperts(TorchLinear()).route
    for tokens in (0, 1, 2, 9, 75):
        for held, hidden, width, slots in ((7, 40, 24, 3), (4, 37, 9, 1), (6, 64, 48, 6)):
            matrices = normal(held * 2 * width, hidden) / hidden**0.5, normal(held * hidden, width) / width**0.5
            x, residual = normal(tokens, hidden), normal(tokens, hidden)
            everywhere = route(floats(tokens, held), slots, normalize=True)
            yield x, everywhere, held, *matrices, (None, None), "silu", 0, None, None, False
            gate = floats(tokens, 1) if slots > 1 else None
            elsewhere = route(floats(tokens, held + 5), slots, normalize=False)
            yield (
                x,
                elsewhere,
                held,
                *matrices,
                (None, None),
                "gelu_tanh",
                3,
                SharedExpertOutput(normal(tokens, hidden), gate),
                residual,
                slots != 3,
            )


def biased_experts_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """As experts_inputs, with biases."""
    normal, floats = normals(dtype, seed), normals(torch.float32, seed + 1)
    for tokens in (0, 1, 2, 31):
        held, hidden, width, slots = 5, 40, 24, 2
        matrices = normal(held * 2 * width, hidden) / hidden**0.5, normal(held * hidden, width) / width**0.5
        routing = TorchExperts(TorchLinear()).route(floats(tokens, held), slots, normalize=True)
        biases = normal(held * 2 * width), normal(held * hidden)
        yield normal(tokens, hidden) * 3, routing, held, *matrices, biases, "swiglu_oai", 0, None, None, False


def ungated_experts_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """As experts_inputs, of experts without a gate."""
    normal, floats = normals(dtype, seed), normals(torch.float32, seed + 1)
    for tokens, activation in (
        (0, "relu"),
        (1, "relu"),
        (2, "relu_squared"),
        (9, "gelu"),
        (75, "relu_squared"),
    ):
        held, hidden, width, slots = 7, 40, 25, 3
        matrices = normal(held * width, hidden) / hidden**0.5, normal(held * hidden, width) / width**0.5
        routing = TorchExperts(TorchLinear()).route(floats(tokens, held), slots, normalize=True)
        shared = SharedExpertOutput(normal(tokens, hidden), None) if tokens > 1 else None
        yield normal(tokens, hidden), routing, held, *matrices, (None, None), activation, 0, shared, None, False


def run_route(experts: Any, arguments: tuple[Any, ...]) -> Routing:
    logits, slots, normalize, scoring, bias, scales = arguments
    options = {"normalize": normalize, "scoring": scoring, "bias": bias, "scales": scales}
    routing: Routing = experts.route(logits, slots, **options)
    return routing


def run_experts(experts: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, routing, count, gate_up, down, biases, activation, first, shared, residual, weigh_inputs = arguments
    options = {"first": first, "shared": shared, "residual": residual, "weigh_inputs": weigh_inputs}
    gated = len(gate_up) == 2 * down.shape[1] * count
    matrices = experts.pack(gate_up, count, biases[0], gated=gated), experts.pack(down, count, biases[1])
    result: Tensor = experts(x, routing, *matrices, activation, **options)
    return result
