"""A model as data: what its layers are and where its tensors come from. No torch: `plan` and the simulator size models
from this alone.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.config.facts import PageShape
from penstock.families.attention_kinds import AttentionSpec

Activation = Literal["silu", "gelu_tanh"]
ParameterKind = Literal["vector", "matrix", "gated", "vocabulary", "router"]


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: each token goes through `experts_per_token` of many gated MLPs, which a router chooses by
    the largest of its logits; their outputs are weighted by the softmax over all logits. A shared expert sees every
    token.

    Parameters of layer i, a dense layer's `gate_up` and `down` not among them:
    - `router.weight` [num_experts, hidden], in full precision however weights are quantised;
    - `experts.gate_up.weight` [held * 2 * intermediate_size, hidden]: expert by expert its gate rows, then its up rows;
    - `experts.down.weight` [held * hidden, intermediate_size];
    - with a shared expert `shared.gate_up.weight`, `shared.down.weight`, and with a gate of its own
      `shared.gate.weight` [1, hidden], in full precision too.
    """

    num_experts: int  # that the router chooses among, here or elsewhere
    experts_per_token: int
    intermediate_size: int  # of an expert
    normalize: bool  # the weights of a token's experts are made to sum to 1
    shared_intermediate_size: int = 0  # 0: there is no shared expert
    shared_gate: bool = False  # the shared expert's output is scaled by a sigmoid of the token
    first_expert: int = 0  # of those held here, which follow each other;
    local_experts: int = 0  # 0: all of them. A token's other experts contribute nothing

    @property
    def held(self) -> int:
        """How many experts are held here."""
        return self.local_experts or self.num_experts


@dataclass(frozen=True)
class LayerSpec:
    """One decoder block: attention and a gated MLP or, with `moe`, a mixture of them; each of the two with a norm
    before and, with `post_norms`, one after."""

    attention: AttentionSpec
    intermediate_size: int  # of the MLP; 0 where there is a mixture instead
    kv_group: int  # index into ModelSpec.windows
    activation: Activation = "silu"
    mlp_bias: bool = False
    post_norms: bool = False  # Gemma: norm the block's output before it joins the residual
    moe: MoESpec | None = None


@dataclass(frozen=True)
class TensorSource:
    """Rows `start` to `start + rows` of a parameter come from checkpoint tensor `name`: from all of it, or where it is
    divided among ranks from its rows from `first_row` on, and of these `columns` columns (0: all) from `first_column`.
    """

    name: str
    start: int
    rows: int
    first_row: int = 0
    first_column: int = 0
    columns: int = 0


@dataclass(frozen=True)
class Parameter:
    """A tensor as the model executes it. Fused ones (qkv, gate_up) name several sources, stacked along dimension 0."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]
    experts: int = 1  # so many matrices of the same shape and kind, stacked

    @property
    def kind(self) -> ParameterKind:
        """Norms and biases are vectors; a gated matrix is two, stacked: the gate, then what it gates; embedding and
        head are the vocabulary's; a router's and a shared expert's gate stay in full precision."""
        if len(self.shape) == 1:
            return "vector"
        if self.name in ("embedding.weight", "head.weight"):
            return "vocabulary"
        if self.name.endswith((".router.weight", ".shared.gate.weight")):
            return "router"
        return "gated" if self.name.endswith(".gate_up.weight") else "matrix"

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


def stacked(name: str, columns: tuple[int, ...], *sources: tuple[str, int], experts: int = 1) -> Parameter:
    """A parameter made of (tensor name, rows), stacked in order; `columns` is the shape after dimension 0."""
    parts, start = [], 0
    for source, rows in sources:
        parts.append(TensorSource(source, start, rows))
        start += rows
    return Parameter(name, (start, *columns), tuple(parts), experts)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model, or one rank's part of it (see shard.py).

    `windows[g]` is the number of tokens a query of KV group g sees, itself included; 0 is all. Layers name their group.
    A rank has all the groups, also those that none of its layers is in. Its embedding and head, where it has them, are
    rows `vocab_start` to `vocab_start + vocab_size` of the `vocab_total` that the model has.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    windows: tuple[int, ...]  # one per KV group, ascending: (0,), (4096,), (0, 512)
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    norm_offset: float = 0.0  # added to every norm's weight, in fp32, by whoever executes it: Gemma stores weight - 1
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size), rounded to the weights' dtype
    checkpoint_dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    ignored_tensors: tuple[str, ...] = ()  # fnmatch patterns of checkpoint tensors that carry no weights of ours
    duplicates: tuple[tuple[str, str], ...] = ()  # (tensor, the source it must equal where it is there): a tied head
    vocab_start: int = 0
    vocab_total: int = 0  # 0: vocab_size

    @property
    def vocabulary(self) -> int:
        """Tokens that the whole model knows: the width of its logits."""
        return self.vocab_total or self.vocab_size

    @property
    def has_head(self) -> bool:
        """Whether hidden states become logits here, by the final norm and the head: not in an earlier stage."""
        return any(parameter.name == "norm.weight" for parameter in self.parameters)

    def group_layers(self, group: int) -> list[int]:
        """Indices of the layers in a KV group, in order: the layer's place in its group's page."""
        return [i for i, layer in enumerate(self.layers) if layer.kv_group == group]

    def group_page(self, group: int) -> PageShape:
        """What each layer of a KV group keeps in a page: all of them the same. Of width 0 without a layer."""
        layers = self.group_layers(group)
        return self.layers[layers[0]].attention.page if layers else PageShape(1, 1, 0)

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The width of a row that each layer keeps: the sizes that attention kernels must support."""
        return tuple(layer.attention.page.width for layer in self.layers)

    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)
