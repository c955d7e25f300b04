"""Reads from a trace what a model computes, as ops of our kernels.

A value is known by its op if one of our kernels computes it: a norm, a product, an MLP, a sum, attention. What lies
between, such as a rotation, may only move, add and multiply elements. It is recognised by the numbers that went in and
came out: two such functions that agree on random numbers are equal.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.models.module_graphs import MlpParts, NormParts
from penstock.models.traced.rotary import Rotary
from penstock.models.traced.trace import AttentionCall, Leaf, Trace, TracedCall, tensors_in

# Functions that move, add and multiply elements, or copy them.
_MOVING = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "swapaxes",
        "permute",
        "movedim",
        "contiguous",
        "clone",
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "expand",
        "repeat_interleave",
        "__getitem__",
        "chunk",
        "split",
        "unbind",
        "cat",
        "concat",
        "stack",
        "to",
        "float",
        "type_as",
        "neg",
        "__neg__",
        "mul",
        "__mul__",
        "__rmul__",
        "sub",
        "__sub__",
    ]
)
_SUMS = frozenset({"add", "__add__", "__radd__"})
_CHANGING = frozenset(
    ["__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__", "__ior__"]
)
# Functions by whose results Python code may choose what to compute.
_READS = frozenset(
    ["__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "equal", "allclose"]
)


class NotRecognised(Exception):
    """The model computes something that our kernels do not, or that is not found by its numbers."""


@dataclass(eq=False)
class Node:
    """A value with a row for each token. `inputs` are the values that it is computed from."""

    value: Tensor  # as traced, [tokens, width]
    inputs: list["Node"]


@dataclass(eq=False)
class InputNode(Node):
    place: int  # among all that is given


@dataclass(eq=False)
class RowsNode(Node):
    module: nn.Embedding


@dataclass(eq=False)
class NormNode(Node):
    """A norm of rows, or of each head in them."""

    norm: NormParts


@dataclass(eq=False)
class ProductNode(Node):
    """A linear's product. A second input is added to it."""

    module: nn.Linear


@dataclass(eq=False)
class MlpNode(Node):
    """An MLP. A second input is added to it."""

    module: nn.Module


@dataclass(eq=False)
class TorchNode(Node):
    """The result of a module that torch computes, because no kernel of ours does."""

    module: nn.Module


@dataclass(eq=False)
class SumNode(Node):
    """The sum of two values."""


@dataclass(eq=False)
class AttentionNode(Node):
    """Attention, with the projections before it, their norms and their rotation."""

    call: AttentionCall
    projections: tuple[nn.Linear, ...]
    # int64: the rows of query heads, key heads and value heads, in the projections' weights one below the other.
    rows: Tensor
    sizes: tuple[int, int, int]  # query heads, KV heads, head_dim
    norms: tuple[NormParts, NormParts] | None  # of queries and of keys
    rotary: Rotary


class GraphReader:
    """Reads a trace. Its values are known by the tensors that hold them."""

    def __init__(
        self,
        trace: Trace,
        leaves: Mapping[nn.Module, Leaf],
        given: Sequence[Tensor],
        rotations: Sequence[Rotary] = (),
    ) -> None:
        """`given` are the tensors with which the traced forward was called, [1, tokens, ...]: with rotations the
        second one has positions. Raises NotRecognised if a call changes a tensor, or code depends on values."""
        self._leaves, self._rotations = leaves, rotations
        self._tokens = given[0].shape[1]
        self._nodes: dict[int, Node] = {id(each): InputNode(self._flat(each), [], i) for i, each in enumerate(given)}
        self._positions = given[1] if rotations else None
        self._made: dict[int, TracedCall] = {}  # by the tensor that the call made
        self._by_position: dict[int, bool] = {}
        for call in trace.calls:
            used = {id(tensor) for tensor in tensors_in((call.arguments, call.options))}
            if _changes(call) or (call.name in _READS and used & (self._made.keys() | self._nodes.keys())):
                raise NotRecognised(f"it calls {call.name}")
            for tensor in tensors_in(call.result):
                if id(tensor) not in used:
                    self._made[id(tensor)] = call
            if isinstance(call.result, Tensor) and id(call.result) not in used:
                node = self._node(call)
                if node is not None:
                    self._nodes[id(call.result)] = node

    def order(self, output: Tensor) -> list[Node]:
        """Returns the values from which `output` is computed, in the order in which they were computed; it is the last
        one. Raises NotRecognised."""
        last = self.rows(output)
        if last is None:
            raise NotRecognised("its result is none of our ops'")
        needed, pending = {last}, [last]
        while pending:
            more = [node for node in pending.pop().inputs if node not in needed]
            needed.update(more)
            pending += more
        return [node for node in self._nodes.values() if node in needed]

    def rows(self, tensor: Tensor) -> Node | None:
        """Returns the value whose rows are those of the tensor [1, tokens, ...]."""
        node = self._source(tensor)
        if node is None or tensor.dtype != node.value.dtype or tensor.numel() != node.value.numel():
            return None
        return node if torch.equal(tensor.reshape(node.value.shape), node.value) else None

    def _node(self, call: TracedCall) -> Node | None:
        """The value that a call computes, if it is known."""
        if call.attention is not None:
            return self._attention(call, call.attention)
        if call.module is not None:
            return None if len(call.arguments) != 1 or call.options else self._of_module(call, call.module)
        if call.name not in _SUMS or call.options or len(call.arguments) != 2:
            return None
        if not all(isinstance(each, Tensor) and each.shape == call.result.shape for each in call.arguments):
            return None
        inputs = [node for each in call.arguments if (node := self.rows(each)) is not None]
        return SumNode(self._flat(call.result), inputs) if len(inputs) == 2 else None

    def _of_module(self, call: TracedCall, module: nn.Module) -> Node | None:
        (x,) = call.arguments
        leaf, source = self._leaves[module], self.rows(x)
        parts = leaf.parts
        if isinstance(parts, NormParts) and (source is None or source.value.shape[1] != len(parts.weight)):
            return self._head_norm(x, call.result, parts)
        if source is None:
            return None
        value, inputs = self._flat(call.result), [source]
        if leaf.by_torch:
            return TorchNode(value, inputs, module)
        if isinstance(module, nn.Embedding):
            return RowsNode(value, inputs, module) if isinstance(source, InputNode) else None
        if isinstance(parts, NormParts):
            return NormNode(value, inputs, parts)
        if isinstance(module, nn.Linear):
            return ProductNode(value, inputs, module)
        return MlpNode(value, inputs, module) if isinstance(parts, MlpParts) else None

    def _head_norm(self, x: Tensor, result: Tensor, norm: NormParts) -> Node | None:
        source = self._source(x)
        heads, normed = self._by_token(x), self._by_token(result)
        if not isinstance(source, ProductNode) or heads is None or normed is None or heads.shape[2] != len(norm.weight):
            return None
        same = heads.numel() == source.value.numel() and torch.equal(heads.flatten(1), source.value)
        return NormNode(normed.flatten(1), [source], norm) if same else None

    def _by_token(self, heads: Tensor) -> Tensor | None:
        """[tokens, heads, head_dim] of heads with or without the tokens first."""
        if heads.dim() != 4 or len(heads) != 1 or self._tokens not in heads.shape[1:3]:
            return None
        return heads[0] if heads.shape[1] == self._tokens else heads[0].transpose(0, 1)

    def _attention(self, call: TracedCall, attention: AttentionCall) -> Node | None:
        query, key, value = (each[0].transpose(0, 1) for each in call.arguments)  # [tokens, heads, head_dim]
        sources = [self._source(each) for each in call.arguments]
        norms = [each.norm for each in sources[:2] if isinstance(each, NormNode)]
        products = [each.inputs[0] if isinstance(each, NormNode) else each for each in sources[:2]] + sources[2:]
        projections = [each for each in dict.fromkeys(products) if isinstance(each, ProductNode)]
        given = {node for product in projections for node in product.inputs}
        if not all(isinstance(each, ProductNode) for each in products) or len(given) != 1 or len(norms) not in (0, 2):
            return None
        sizes = query.shape[1], key.shape[1], query.shape[2]
        if norms and (len(projections) != 3 or not _alike(norms[0], norms[1], sizes)):
            return None
        before = torch.cat([each.value for each in (sources if norms else projections) if each is not None], 1)
        for rows in _orders(*sizes):
            if len(rows) != before.shape[1]:
                return None
            heads = before[:, rows].unflatten(1, (-1, sizes[2]))
            q, k, v = heads.split((sizes[0], sizes[1], sizes[1]), 1)
            if torch.equal(v, value) and (rotary := self._rotary((q, query), (k, key))) is not None:
                modules = tuple(each.module for each in projections)
                pair = (norms[0], norms[1]) if norms else None
                return AttentionNode(self._flat(call.result), [*given], attention, modules, rows, sizes, pair, rotary)
        return None

    def _rotary(self, *turned: tuple[Tensor, Tensor]) -> Rotary | None:
        """The rotation of all these heads, before and after."""
        assert self._positions is not None, "a model with attention has positions"
        positions = self._positions[0]
        return next((r for r in self._rotations if all(r.explains(*each, positions) for each in turned)), None)

    def _source(self, tensor: Tensor) -> Node | None:
        """The only known value that a tensor's elements come from by moving, adding and multiplying."""
        found: set[Node] = set()
        pending = [tensor]
        while pending:
            each = pending.pop()
            if (node := self._nodes.get(id(each))) is not None:
                found.add(node)
            elif not self._depends_on_position(each):
                call = self._made.get(id(each))
                if call is None or call.module is not None or call.name not in _MOVING | _SUMS:
                    return None
                pending += tensors_in((call.arguments, call.options))
        return found.pop() if len(found) == 1 else None

    def _depends_on_position(self, tensor: Tensor) -> bool:
        """Whether a tensor is computed from constants and positions alone, by any functions of torch."""
        known = self._by_position.get(id(tensor))
        if known is None:
            call = self._made.get(id(tensor))
            if call is None:
                known = tensor is self._positions or id(tensor) not in self._nodes
            else:
                inside = tensors_in((call.arguments, call.options))
                plain = call.module is None and call.attention is None
                known = plain and all(map(self._depends_on_position, inside))
            self._by_position[id(tensor)] = known
        return known

    def _flat(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self._tokens, -1)


def _changes(call: TracedCall) -> bool:
    """Whether a function changes one of its arguments."""
    name = call.name
    return name in _CHANGING or (name.endswith("_") and not name.endswith("__")) or "out" in call.options


def _orders(heads: int, kv_heads: int, size: int) -> Iterator[Tensor]:
    """The rows of query heads, key heads and value heads in a projection of all: in this order, or each KV head with
    its query heads, its key and its value."""
    rows = torch.arange((heads + 2 * kv_heads) * size)
    yield rows
    groups = rows.view(kv_heads, -1, size)
    yield torch.cat((groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()))


def _alike(query: NormParts, key: NormParts, sizes: tuple[int, int, int]) -> bool:
    """Whether the cache op can norm queries and keys: each head, or all heads together."""
    heads, kv_heads, size = sizes
    if (query.eps, query.centered) != (key.eps, key.centered) or query.bias is not None or key.bias is not None:
        return False
    by_head = len(query.weight) == len(key.weight) == size
    together = (len(query.weight), len(key.weight)) == (heads * size, kv_heads * size)
    return by_head or (together and not query.centered)
