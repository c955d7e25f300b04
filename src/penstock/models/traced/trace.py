"""Records one forward of torch's modules, call by call, with the tensors that go in and come out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.models.module_graphs import MlpParts, NormParts, mlp_of, norm_of


@dataclass(frozen=True)
class AttentionCall:
    """The settings that a layer passes to our attention, besides queries, keys and values."""

    module: nn.Module
    layer: int
    scale: float
    softcap: float
    sinks: Tensor | None  # fp32 [heads]


class TracedCall(NamedTuple):
    """A call of a function of torch, of a module that is recorded as one call, or of our attention."""

    name: str  # the function's
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]  # arguments by keyword
    result: Any
    module: nn.Module | None = None
    attention: AttentionCall | None = None


class Leaf(NamedTuple):
    """A module that is recorded as one call. A norm or an MLP has `parts`; a linear or an embedding has none."""

    parts: NormParts | MlpParts | None
    width: int  # of a row of its result; 0: of its argument's
    dtype: torch.dtype
    by_torch: bool = False  # no kernel of ours computes it


def leaves_of(model: nn.Module) -> Mapping[nn.Module, Leaf]:
    """Returns the modules that our kernels compute: norms, MLPs, plain linears and embeddings."""
    leaves: dict[nn.Module, Leaf] = {}
    for module in model.modules():
        if (norm := norm_of(module)) is not None:
            leaves[module] = Leaf(norm, len(norm.weight), norm.weight.dtype)
        elif (mlp := mlp_of(module)) is not None:
            weight = module.get_submodule(mlp.down).weight
            assert isinstance(weight, Tensor)
            leaves[module] = Leaf(mlp, len(weight), weight.dtype)
        elif type(module) is nn.Linear:
            leaves[module] = Leaf(None, module.out_features, module.weight.dtype)
        elif type(module) is nn.Embedding:
            leaves[module] = Leaf(None, module.embedding_dim, module.weight.dtype)
    return leaves


def beside_attention(model: nn.Module, trace: "Trace") -> Sequence[nn.Module]:
    """Returns the largest modules that call no attention: the other parts of decoder layers, and those beside the
    layers."""
    called = {call.attention.module for call in trace.calls if call.attention is not None}
    around: set[nn.Module] = set()
    for module in reversed([*model.modules()]):  # children first
        if not (called | around).isdisjoint(module.children()):
            around.add(module)
    beside = [child for module in around for child in module.children() if child not in called | around]
    return [module for module in beside if type(module) not in (nn.Dropout, nn.Identity)]


class Trace(TorchFunctionMode):
    """Records the calls that are made within `recording`. A leaf and attention compute nothing: their results are
    random numbers, so that values are told apart whatever the weights are. All tensors are kept, so no two have one
    identity."""

    def __init__(self, leaves: Mapping[nn.Module, Leaf]) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []
        self._leaves = leaves
        self._paused = False
        self._random = torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if not self._paused:
            self.calls.append(TracedCall(getattr(func, "__name__", ""), args, options, result))
        return result

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records what is called within."""
        for module, leaf in self._leaves.items():
            module.__dict__["forward"] = self._forward(module, leaf)
        try:
            with self, torch.inference_mode():
                yield
        finally:
            for module in self._leaves:
                del module.__dict__["forward"]

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Records a call of our attention."""
        with self._pause():
            _, heads, tokens, size = query.shape
            result = self._numbers((1, tokens, heads, size), query.dtype)
        self.calls.append(TracedCall("attention", (query, key, value), {}, result, attention=call))
        return result

    def _forward(self, module: nn.Module, leaf: Leaf) -> Any:
        forward = module.forward

        def record(*arguments: Any, **options: Any) -> Any:
            x, plain = arguments[0] if arguments else None, len(arguments) == 1 and not options
            if not isinstance(x, Tensor) or (leaf.by_torch and not plain):
                return forward(*arguments, **options)
            with self._pause() as within:
                result = self._result(module, leaf, x)
                known = not leaf.by_torch or _alike(forward(x), x)
            if not known:
                return forward(x)
            if not within:
                self.calls.append(TracedCall("module", arguments, options, result, module))
            return result

        return record

    def _result(self, module: nn.Module, leaf: Leaf, x: Tensor) -> Tensor:
        rows = x.shape if isinstance(module, nn.Embedding) else x.shape[:-1]
        return self._numbers((*rows, leaf.width or x.shape[-1]), leaf.dtype)

    @contextmanager
    def _pause(self) -> Iterator[bool]:
        """Records nothing within. Gives whether that was so before."""
        paused, self._paused = self._paused, True
        try:
            yield paused
        finally:
            self._paused = paused

    def _numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self._random).to(dtype)


def _alike(result: Any, x: Tensor) -> bool:
    return isinstance(result, Tensor) and (result.shape, result.dtype) == (x.shape, x.dtype)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Returns the tensors in arguments or in a result, nested ones included."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
