"""Recognises norms and MLPs among torch's modules by the graph of their forward, which torch.fx traces, and not by
their class or the names in their code."""

import operator
from dataclasses import dataclass
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
class Norm:
    """A norm of the last dimension: RMSNorm or LayerNorm."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centered: bool  # LayerNorm


@dataclass(frozen=True)
class Mlp:
    """What the graph of an MLP says: down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    gate: str  # "": it has none
    up: str
    down: str
    activation: str  # a name in UNGATED, and of a gated one in ACTIVATIONS


def norm_of(module: nn.Module) -> Norm | None:
    """Returns what a norm computes; None if the module is none of ours."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or any(True for _ in module.children()):
        return None
    if bias is not None and bias.dtype != weight.dtype:
        return None
    if type(module) is nn.LayerNorm:
        return Norm(weight.detach(), None if bias is None else bias.detach(), module.eps, True)
    constants = [value for value in vars(module).values() if type(value) is float]
    if len(constants) != 1 or len(list(module.parameters())) != 1:
        return None
    graph = _graph(module)
    if graph is None or graph != _graph(_Rms(constants[0])):
        return None
    return Norm(weight.detach(), None, constants[0], False)


def mlp_of(module: nn.Module) -> Mlp | None:
    """Returns how a module of two or three plain linear modules computes; None if it is no MLP of ours."""
    linears = [name for name, child in module.named_children() if type(child) is nn.Linear]
    leaves = all(not any(True for _ in child.children()) for child in module.children())
    if len(linears) not in (2, 3) or not leaves or len(list(module.parameters())) > 2 * len(linears):
        return None
    graph = _graph(module)
    if graph is None:
        return None
    return _gated(module, graph) if len(linears) == 3 else _ungated(module, graph)


def activation_name(function: Any) -> str | None:
    """Returns the name in UNGATED of a function, by its values; None if it is another one."""
    if isinstance(function, nn.Module) and any(True for _ in function.parameters()):
        return None
    x = torch.cat((torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -200.0, 200.0, 1e4])))
    y = function(x)
    return next((name for name, ours in UNGATED.items() if torch.allclose(y, ours(x), rtol=1e-5, atol=1e-6)), None)


class _Tracer(fx.Tracer):
    """Traces the forward of one module, whose children stay calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


_Graph = list[tuple[Any, ...]]  # (kind, target, arguments): a node is its place, as ("node", place)


def _graph(module: nn.Module) -> _Graph | None:
    """Returns the steps of a module's forward; None if it cannot be traced. Dropout is left out."""
    try:
        nodes = list(_Tracer().trace(module).nodes)
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


def _ungated(module: nn.Module, graph: _Graph) -> Mlp | None:
    if len(graph) != 5:
        return None
    _, up, activation, down, _ = graph
    name = _activation(module, activation)
    expected = _chain((0, up), (1, activation), (2, down), (3, graph[4]))
    if name is None or not expected or not _linear(module, up) or not _linear(module, down):
        return None
    return Mlp("", up[1], down[1], name)


def _gated(module: nn.Module, graph: _Graph) -> Mlp | None:
    if len(graph) != 7:
        return None
    _, gate, activation, up, product, down, output = graph
    name = _activation(module, activation)
    multiplies = product[:2] == ("call_function", operator.mul) and product[2] == (
        (("node", 2), ("node", 3)),
        (),
    )
    expected = _chain((0, gate), (1, activation), (0, up), (4, down), (5, output))
    if (
        name not in ACTIVATIONS
        or not multiplies
        or not expected
        or not all(_linear(module, each) for each in (gate, up, down))
    ):
        return None
    return Mlp(gate[1], up[1], down[1], name)


def _chain(*steps: tuple[int, tuple[Any, ...]]) -> bool:
    """Whether each step's only argument is the result of the step at that place."""
    return all(arguments == ((("node", place),), ()) for place, (_, _, arguments) in steps)


def _linear(module: nn.Module, step: tuple[Any, ...]) -> bool:
    return step[0] == "call_module" and type(module.get_submodule(step[1])) is nn.Linear


def _activation(module: nn.Module, step: tuple[Any, ...]) -> str | None:
    kind, target, _ = step
    if kind == "call_module":
        return activation_name(module.get_submodule(target))
    return activation_name(target) if kind == "call_function" else None
