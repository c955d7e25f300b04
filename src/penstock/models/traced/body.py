"""Executes a decoder of torch's modules with our kernels, by the ops that were read from a trace."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.kernels import Kernels
from penstock.kernels.attention import HeadNorm
from penstock.models.attention import LayerCache
from penstock.models.decoder import StepInput
from penstock.models.module_graphs import NormParts
from penstock.models.packed_modules import MlpForward, ModulePacking, PackedEmbedding, PackedLinear
from penstock.models.product import Product
from penstock.models.traced.graph import (
    AttentionNode,
    InputNode,
    MlpNode,
    Node,
    NormNode,
    NotRecognised,
    ProductNode,
    RowsNode,
    SumNode,
    TorchNode,
)
from penstock.models.traced.rotary import Rotary


class PackedRows(nn.Module):
    """Computes what one of several linears computed that are packed as one, with their rows in another order."""

    def __init__(self, together: PackedLinear, places: Tensor) -> None:
        super().__init__()
        self.together, self.places = together, places

    def forward(self, x: Tensor) -> Tensor:
        own: Tensor = self.together(x)[..., self.places]
        return own


@dataclass(frozen=True)
class _StepValues:
    """The inputs of a step that its ops read, besides the values of other ops."""

    step: StepInput
    caches: Sequence[LayerCache]
    rotations: Mapping[Rotary, Any]


_Op = Callable[..., Tensor]  # (run, value, ...) to a value


class TracedBody:
    """The ops from token ids to the last hidden states. `groups` has the KV group of each layer.

    The constructor packs the weights of the model, which `check_packable` has let pass: projections of attention as
    one, then the rest by `packing`."""

    def __init__(
        self,
        model: nn.Module,
        nodes: Sequence[Node],
        packing: ModulePacking,
        kernels: Kernels,
        groups: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._kernels, self._groups, self._dtype = kernels, groups, dtype
        self._names = {module: name for name, module in model.named_modules()}
        self._places = {child: (parent, name) for parent in model.modules() for name, child in parent.named_children()}
        nodes = _with_sums_in_products(nodes)
        self._joined = {node: self._join(node) for node in nodes if isinstance(node, AttentionNode)}
        self._rotaries = {node.rotary for node in self._joined}
        self.nbytes: int = sum(weight.product.nbytes for weight in self._joined.values()) + packing.pack(kernels)
        self._ops: list[tuple[_Op, tuple[int, ...], Sequence[int]]] = []
        place = {node: i for i, node in enumerate(nodes)}
        last_use = {source: i for i, node in enumerate(nodes) for source in node.inputs}
        for i, node in enumerate(nodes):
            done = [place[source] for source in {*node.inputs} if last_use[source] == i]
            self._ops.append((self._op(model, node), tuple(place[source] for source in node.inputs), done))
        self._joined, self._places, self._names = {}, {}, {}  # they hold the unpacked weights

    def __call__(self, step: StepInput, caches: Sequence[LayerCache]) -> Tensor:
        """Returns the last hidden states [tokens, hidden]. Writes keys and values to `caches`, one per layer."""
        rotation = self._kernels.attention.rotation
        rotations = {each: rotation(step.positions, each.frequencies, self._dtype) for each in self._rotaries}
        run = _StepValues(step, caches, rotations)
        values: dict[int, Tensor] = {}
        for place, (op, inputs, done) in enumerate(self._ops):
            values[place] = op(run, *(values[i] for i in inputs))
            for i in done:  # its memory can be used again
                del values[i]
        return values[len(self._ops) - 1]

    def _join(self, node: AttentionNode) -> PackedLinear:
        """Packs the projections of a layer as one, with the rows of each head in the order that the rotation needs."""
        heads, kv_heads, size = node.sizes
        turned, values = node.rows.split(((heads + kv_heads) * size, kv_heads * size))
        rows = torch.cat((turned.view(-1, size)[:, node.rotary.order].flatten(), values))
        bias = None
        if any(linear.bias is not None for linear in node.projections):
            biases: list[Tensor] = [
                linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
                for linear in node.projections
            ]
            bias = torch.cat(biases).detach()[rows]
        weight = torch.cat([linear.weight.detach() for linear in node.projections])[rows]
        together, first = PackedLinear(self._kernels, weight, bias, name="qkv"), 0
        for linear in node.projections:
            parent, name = self._places[linear]
            setattr(parent, name, PackedRows(together, rows.argsort()[first : first + linear.out_features]))
            first += linear.out_features
        return together

    def _op(self, model: nn.Module, node: Node) -> _Op:
        """The op that computes a value, for values of its inputs."""
        kernels = self._kernels
        if isinstance(node, InputNode):
            return (lambda run: run.step.token_ids, lambda run: run.step.positions)[node.place]
        if isinstance(node, RowsNode):
            table = self._table(model, node.module)
            return lambda run, ids: table.rows(ids, 1.0, self._dtype)
        if isinstance(node, NormNode):
            return _norm(kernels, node.norm)
        if isinstance(node, ProductNode):
            now = self._now(model, node.module)
            assert isinstance(now, PackedLinear), "`check_packable` has let it pass"
            product = now.product
            return lambda run, x, residual=None: product(x, residual)
        if isinstance(node, MlpNode):
            return _mlp(vars(self._now(model, node.module))["forward"])
        if isinstance(node, AttentionNode):
            return self._attention(node)
        if isinstance(node, TorchNode):
            return _other(kernels, node.module)
        ones = torch.ones(node.value.shape[1], dtype=self._dtype)
        return lambda run, x, y: kernels.rms_norm(x, y, ones, 1.0, 0.0)[1]  # the norm's kernel also gives the sum

    def _attention(self, node: AttentionNode) -> _Op:
        kernels, product = self._kernels, self._joined[node].product
        norm, kind, eps = _head_norm(node)
        heads, rotary, layer, group = node.sizes[0], node.rotary, node.call.layer, self._groups[node.call.layer]
        scale, softcap, sinks = node.call.scale, node.call.softcap, node.call.sinks

        def attend(run: _StepValues, x: Tensor) -> Tensor:
            given, cache = run.step.groups[group], run.caches[layer]
            where = cache.keys, cache.values, given.blocks, given.offsets
            qkv, rotation = product(x), run.rotations[rotary]
            query = kernels.attention.store(qkv, heads, norm, rotation, *where, eps, 0.0, norm=kind)
            pages = cache.keys, cache.values, given.attention
            attended = kernels.attention(query, *pages, scale, softcap=softcap, sinks=sinks)
            return attended.view(len(x), -1)

        return attend

    def _now(self, model: nn.Module, module: nn.Module) -> nn.Module:
        """The module that is now where a traced one was."""
        return model.get_submodule(self._names[module])

    def _table(self, model: nn.Module, embedding: nn.Embedding) -> Product:
        """The product that has the weight of an embedding."""
        now = self._now(model, embedding)
        if not isinstance(now, PackedEmbedding):
            packed = PackedLinear(self._kernels, embedding.weight.detach(), None)
            self.nbytes += packed.product.nbytes
            parent, name = self._places[embedding]
            now = PackedEmbedding(packed)
            setattr(parent, name, now)
        return now.head.product


def check_packable(
    model: nn.Module, nodes: Sequence[Node], packing: ModulePacking, layers: int, dtype: torch.dtype
) -> None:
    """Raises NotRecognised if the weights of ops cannot be packed, or an op computes in another dtype."""
    weights = Counter(
        weight.data_ptr() for module in model.modules() if isinstance(weight := getattr(module, "weight", None), Tensor)
    )
    attention = [node for node in nodes if isinstance(node, AttentionNode)]
    if (calls := [node.call.layer for node in attention]) != [*range(layers)]:
        raise NotRecognised(f"the attention of layers {calls} is recognised, of {layers}")
    projections = [each for node in attention for each in node.projections]
    others = [node.module for node in nodes if isinstance(node, ProductNode)]
    if any(count > 1 for count in Counter([*projections, *others]).values()):
        raise NotRecognised("it uses a linear twice")
    if any(weights[each.weight.data_ptr()] > 1 for each in projections):
        raise NotRecognised("a projection of attention shares its weight")
    for node in nodes:
        if isinstance(node, ProductNode | MlpNode) and not packing.packs(node.module):
            raise NotRecognised(f"a weight of {type(node.module).__name__} cannot be packed")
    norms = [node.norm for node in nodes if isinstance(node, NormNode)]
    if any(isinstance(node, NormNode) and node.value.shape[1] != len(node.norm.weight) for node in nodes):
        raise NotRecognised("it norms heads that attention does not read")
    norms += [norm for node in attention for norm in node.norms or ()]
    values = [node.value for node in nodes if not isinstance(node, InputNode)]
    for tensor in (*(norm.weight for norm in norms), *values):
        if tensor.dtype != dtype:
            raise NotRecognised(f"it computes in {tensor.dtype}")


def _norm(kernels: Kernels, norm: NormParts) -> _Op:
    if norm.centered:
        return lambda run, x: kernels.layer_norm(x, None, norm.weight, norm.bias, norm.eps)[0]
    return lambda run, x: kernels.rms_norm(x, None, norm.weight, norm.eps, 0.0)[0]


def _mlp(forward: MlpForward) -> _Op:
    up, down, activation = forward.up.product, forward.down.product, forward.mlp.activation
    return lambda run, x, residual=None: down(up.activated(x, activation), residual)


def _other(kernels: Kernels, module: nn.Module) -> _Op:
    """A module that torch computes: a recording calls it between our ops."""
    session = kernels.session
    assert session is not None, "only native kernels record"

    def fill(x: Tensor, out: Tensor) -> None:
        out.copy_(module(x[None])[0])

    def other(run: _StepValues, x: Tensor) -> Tensor:
        out = session.empty(x, x.shape[1], dtype=x.dtype)
        session.call(fill, x, out)
        return out

    return other


def _head_norm(node: AttentionNode) -> tuple[Tensor | None, HeadNorm, float]:
    """The weight [heads + kv_heads, head_dim] of the norm of queries and keys, its kind and its eps."""
    if node.norms is None:
        return None, "heads", 0.0
    heads, kv_heads, size = node.sizes
    query, key = node.norms
    rows = [norm.weight.view(-1, size)[:, node.rotary.order] for norm in node.norms]
    if len(query.weight) == size:
        kind: HeadNorm = "centered" if query.centered else "heads"
        return torch.cat((rows[0].expand(heads, -1), rows[1].expand(kv_heads, -1))), kind, query.eps
    return torch.cat(rows), "whole", key.eps


def _with_sums_in_products(nodes: Sequence[Node]) -> list[Node]:
    """Leaves out each sum that a product can add, because nothing else reads the product and the other value is
    computed before it."""
    uses = Counter(source for node in nodes for source in node.inputs)
    place = {node: i for i, node in enumerate(nodes)}
    instead: dict[Node, Node] = {}
    for node in nodes:
        node.inputs = [instead.get(source, source) for source in node.inputs]
        if not isinstance(node, SumNode):
            continue
        for last, value in (node.inputs, reversed(node.inputs)):
            product = _adds(last, value, uses, place)
            if product is not None:
                product.inputs.append(value)
                instead[node], uses[last] = last, uses[node]
                break
    return [node for node in nodes if node not in instead]


def _adds(last: Node, value: Node, uses: Mapping[Node, int], place: Mapping[Node, int]) -> Node | None:
    """The product that can add a value: `last`, or one whose result `last` adds and nothing else reads."""
    product = last
    while isinstance(product, ProductNode | MlpNode) and uses[product] == 1:
        if len(product.inputs) == 1:
            return product if place[value] < place[product] else None
        product = product.inputs[1]
    return None
