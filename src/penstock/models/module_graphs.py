"""Recognises norms and MLPs among torch's modules by the graph of their forward, which torch.fx traces. The class and
the names of an MLP's modules do not matter; a norm's weight must be called `weight`."""

import operator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.kernels.linear import ACTIVATIONS, UNGATED


class _Rms(nn.Module):
    """RMSNorm as most of transformers' models compute it. Only its graph is used."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


@dataclass(frozen=True)
class NormParts:
    """A norm of the last dimension: RMSNorm or LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool  # LayerNorm


@dataclass(frozen=True)
class MlpParts:
    """The linear modules of down(activation(up(x))), or of down(activation(gate(x)) * up(x)), by name."""

    gate: str  # "": it has none
    up: str
    down: str
    activation: str  # a name in UNGATED, and of a gated one in ACTIVATIONS


def norm_of(module: nn.Module) -> NormParts | None:
    """Returns what a norm computes; None if the module is not a norm that our kernels compute."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not _is_leaf(module):
        return None
    if bias is not None and bias.dtype != weight.dtype:
        return None
    if type(module) is nn.LayerNorm:
        return NormParts(weight.detach(), None if bias is None else bias.detach(), module.eps, True)
    constants = [value for value in vars(module).values() if type(value) is float]  # eps, under any name
    if len(constants) != 1 or len(list(module.parameters())) != 1:
        return None
    if _graph(module) != _rms_graph(constants[0]):
        return None
    return NormParts(weight.detach(), None, constants[0], False)


def mlp_of(module: nn.Module) -> MlpParts | None:
    """Returns the parts of an MLP of two or three plain linear modules; None if our kernels do not compute it."""
    linears = [name for name, child in module.named_children() if type(child) is nn.Linear]
    leaves = all(map(_is_leaf, module.children()))
    if len(linears) not in (2, 3) or not leaves or len(list(module.parameters())) > 2 * len(linears):
        return None
    graph = _graph(module)
    if graph is None:
        return None
    return _gated(module, graph) if len(linears) == 3 else _ungated(module, graph)


def activation_name(function: Any) -> str | None:
    """Returns the name in UNGATED of the function that gives the same values; None if there is none."""
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return None
    x = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -200.0, 200.0, 1e4])))
    try:
        y = function(x)
    except Exception:  # it does not take a row of numbers
        return None
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return None
    return next((name for name, ours in UNGATED.items() if torch.allclose(y, ours(x), rtol=1e-5, atol=1e-6)), None)


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


class _ForwardTracer(fx.Tracer):
    """Traces the forward of one module. Its children are not traced: they stay calls of modules."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


# (kind, target, (arguments, keywords)). An argument that is the result of a step is ("node", the step's place).
_Step = tuple[str, Any, tuple[Any, Any]]
_Graph = list[_Step]


def _graph(module: nn.Module) -> _Graph | None:
    """Returns the steps of a module's forward; None if it cannot be traced. Dropout is left out."""
    try:
        nodes = list(_ForwardTracer().trace(module).nodes)
    except Exception:  # control flow that depends on values, other arguments: not one of ours
        return None
    places: dict[fx.Node, tuple[str, int]] = {}
    graph: _Graph = []
    for node in nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if type(called) in (nn.Dropout, nn.Identity):
            places[node] = places[node.args[0]]
            continue
        arguments = fx.node.map_arg((node.args, tuple(sorted(node.kwargs.items()))), places.__getitem__)
        target = "" if node.op in ("placeholder", "output") else node.target
        places[node] = ("node", len(graph))
        graph.append((node.op, target, arguments))
    return graph


@cache
def _rms_graph(eps: float) -> _Graph | None:
    return _graph(_Rms(eps))


def _ungated(module: nn.Module, graph: _Graph) -> MlpParts | None:
    if len(graph) != 5:
        return None
    _, up, activation, down, output = graph
    if not _chain((0, up), (1, activation), (2, down), (3, output)) or not _linears(module, up, down):
        return None
    name = _activation(module, activation)
    return None if name is None else MlpParts("", up[1], down[1], name)


def _gated(module: nn.Module, graph: _Graph) -> MlpParts | None:
    if len(graph) != 7:
        return None
    _, gate, activation, up, product, down, output = graph
    if product != ("call_function", operator.mul, ((("node", 2), ("node", 3)), ())):
        return None
    chained = _chain((0, gate), (1, activation), (0, up), (4, down), (5, output))
    if not chained or not _linears(module, gate, up, down):
        return None
    name = _activation(module, activation)
    return MlpParts(gate[1], up[1], down[1], name) if name in ACTIVATIONS else None


def _chain(*steps: tuple[int, _Step]) -> bool:
    """Whether each step has one positional argument: the result of the step at the place before it in the pair."""
    return all(arguments == (("node", place),) for place, (_, _, (arguments, _)) in steps)


def _linears(module: nn.Module, *steps: _Step) -> bool:
    """Whether each step calls a plain linear module, and no two steps the same one."""
    linears = [
        name for kind, name, _ in steps if kind == "call_module" and type(module.get_submodule(name)) is nn.Linear
    ]
    return len(set(linears)) == len(steps)


def _activation(module: nn.Module, step: _Step) -> str | None:
    kind, target, (_, options) = step
    if kind == "call_module":
        return activation_name(module.get_submodule(target))
    if kind != "call_function" or any(isinstance(value, tuple) for _, value in options):
        return None
    return activation_name(partial(target, **dict(options)))
