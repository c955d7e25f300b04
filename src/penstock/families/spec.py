"""A model as data: what its layers are and where its tensors come from. No torch: `plan` and the simulator size models
from this alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from penstock.config.facts import PageShape, PoolingFacts
from penstock.config.weights import WeightFormat
from penstock.families.checkpoint.scheme import Scheme
from penstock.families.kinds.attention import AttentionSpec
from penstock.messages import Window

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu_squared", "swiglu_oai"]
_TABLES = ("tokens.", "positions.", "types.", "classifier.")  # of encoders
EncoderActivation = Literal["gelu", "gelu_tanh", "relu", "silu", "tanh"]
ParameterKind = Literal["vector", "matrix", "gated", "vocabulary", "router", "table"]


@dataclass(frozen=True)
class MoESpec:
    """A mixture of experts: each token goes through `experts_per_token` of many MLPs, which a router chooses by
    the largest of its scores; their outputs are weighted by these. Scores are the softmax over all logits, or with
    `sigmoid` that of each. A shared expert sees every token.

    Parameters of layer i, a dense layer's `gate_up` and `down` not among them:
    - `router.weight` [num_experts, hidden], in full precision however weights are quantised; with choice_bias
      `choice.bias` [num_experts], in float32; with biases `router.bias`, `experts.gate_up.bias`, `experts.down.bias`;
    - `experts.gate_up.weight` [held * 2 * intermediate_size, hidden]: expert by expert its gate rows, then its up rows;
    - of a layer that is not gated instead `experts.up.weight` [held * intermediate_size, hidden], `shared.up.weight`;
    - `experts.down.weight` [held * hidden, intermediate_size];
    - with experts_hidden, which stands for hidden above, `experts_in.weight` [experts_hidden, hidden] and
      `experts_out.weight` [hidden, experts_hidden]: the routed experts' sum goes through the second;
    - with a shared expert `shared.gate_up.weight`, `shared.down.weight`, and with a gate of its own
      `shared.gate.weight` [1, hidden], in full precision too;
    - beside an MLP the norms' weights [hidden] `router_norm` (its result is divided by sqrt(hidden)), `experts_norm`,
      `experts_post_norm`, `dense_post_norm`, and `expert_scales.weight` [num_experts], in float32.
    """

    num_experts: int  # that the router chooses among, on all ranks
    experts_per_token: int
    intermediate_size: int  # of an expert
    normalize: bool  # the weights of a token's experts are made to sum to 1
    shared_intermediate_size: int = 0  # 0: there is no shared expert
    shared_gate: bool = False  # the shared expert's output is scaled by a sigmoid of the token
    sigmoid: bool = False
    groups: int = 1  # of equal groups of experts,
    kept_groups: int = 1  # the best so many take part: those with the largest score,
    by_pairs: bool = False  # or with the largest sum of two scores
    weight_scale: float = 1.0  # of the weights of a token's experts
    choice_bias: bool = False  # a bias of scores that changes the choice alone
    biases: bool = False  # of the router and the experts
    weigh_inputs: bool = False  # an expert's input is multiplied by its weight, not its output
    beside_mlp: bool = False  # a layer has an MLP too: see LayerSpec
    experts_hidden: int = 0  # what experts read and write has this size; 0: the model's hidden size
    first_expert: int = 0  # the experts held here are consecutive, from this one;
    local_experts: int = 0  # so many, 0: all. A token's other experts contribute nothing

    @property
    def held(self) -> int:
        """How many experts are held here."""
        return self.local_experts or self.num_experts


@dataclass(frozen=True)
class PerLayerSpec:
    """A layer's own embedding of each token, which joins the residual after the MLP (Gemma 3n, Gemma 4).

    It is (norm(projection of the model's embedding) + row of the table) / sqrt(2). It is multiplied by
    activation(`gate` x), projected to the hidden size, and normed.

    Parameters of layer i, each after `per_layer.`: `table.weight` [rows, width], `projection.weight` and `gate.weight`
    [width, hidden], `norm.weight` [width], `output.weight` [hidden, width], `post_norm.weight` [hidden].
    """

    width: int
    rows: int  # tokens of the table
    layer: int  # the place of its columns and rows in tensors that hold those of all layers
    stacked: str  # the prefix of these tensors


@dataclass(frozen=True)
class LayerSpec:
    """One decoder block: attention and an MLP or, with `moe`, a mixture of them; each of the two with a norm before,
    with `post_norms` one after too. A mixture `beside_mlp` reads the residual that the MLP reads, by norms of its own
    for the router and the experts; the outputs of both are normed and added, and a token's experts are weighted by
    their `expert_scales` too.

    Parameters of layer i besides those of its attention: `attention_norm.weight` and `mlp_norm.weight` [hidden] (with a
    bias if the model's norms have one), with post_norms `attention_post_norm.weight` and `mlp_post_norm.weight`;
    `gate_up.weight` [2 * intermediate_size, hidden], or `up.weight` of an MLP that is not gated; `down.weight`; with
    mlp_bias their biases; those of a mixture instead (see MoESpec).
    """

    attention: AttentionSpec
    intermediate_size: int  # of the MLP; 0: there is none
    kv_group: int  # index into ModelSpec.windows; their number for a layer with a state
    activation: Activation = "silu"
    mlp_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False  # norm the output of attention and of the MLP before it joins the residual
    gated: bool = True  # False: down(activation(up(x)))
    parallel: bool = False  # the MLP reads what attention reads, not its output; there is no norm after
    shared_norm: bool = False  # of a parallel block: attention and MLP share one norm, `attention_norm`
    moe: MoESpec | None = None
    per_layer: PerLayerSpec | None = None
    output_scale: bool = False  # the hidden states after the block are multiplied by `output_scale.weight` [1]

    @property
    def has_mlp(self) -> bool:
        """Whether there is an MLP or a mixture. Else the block ends after attention, and has no `mlp_norm`."""
        return self.intermediate_size > 0 or self.moe is not None

    @property
    def sums(self) -> int:
        """How many times tensor ranks add their parts of a product."""
        beside = self.moe is not None and self.moe.beside_mlp
        return 1 if self.parallel or not self.has_mlp else 2 + beside


@dataclass(frozen=True)
class EncoderSpec:
    """The settings that all layers of an encoder share, and how its text becomes vectors.

    Norms are LayerNorm. A norm or a matrix has a bias if there is a parameter of its name.
    """

    activation: EncoderActivation
    gated: bool = False  # `up` has two halves: activation(first) * second
    norm_first: bool = False  # norms before attention and MLP, not after; layer 0 has no norm before attention
    first_position: int = 0  # the row of `positions` for a text's first token
    segments: bool = False  # the tokens of a pair's second text have type 1, all others type 0
    classifier: EncoderActivation | None = None  # the activation after `classifier.dense`


@dataclass(frozen=True)
class TransformersCode:
    """Transformers' code, which executes a model of a family that Penstock does not have."""

    architecture: str  # its class
    version: str  # of transformers
    config: str  # JSON


@dataclass(frozen=True)
class TensorSource:
    """Rows `start` to `start + rows` of a parameter come from checkpoint tensor `name`: all of it or every `step`-th of
    its rows from `first_row`, and of these `columns` columns (0: all) from `first_column`. With `transposed`, rows and
    columns of the tensor are exchanged. `order` has the order of rows within each head: runs of (first row, count,
    step) in a row. A name that ends in `[i]` means the i-th matrix of a tensor that holds several.
    """

    name: str
    start: int
    rows: int
    first_row: int = 0
    first_column: int = 0
    columns: int = 0
    stored: WeightFormat | None = None  # of the tensor's codes; None for floats
    transposed: bool = False
    order: tuple[tuple[int, int, int], ...] = ()
    step: int = 1

    @property
    def end_row(self) -> int:
        """The row of the tensor after the last one that is used."""
        return self.first_row + (self.rows - 1) * self.step + 1


@dataclass(frozen=True)
class Parameter:
    """A tensor as the model executes it. Fused ones (qkv, gate_up) name several sources, stacked along dimension 0. A
    scalar has one row."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]
    experts: int = 1  # number of equal matrices that are stacked
    sensitive: bool = False  # gets more bits than others where weights are quantised
    parts: tuple[int, ...] = ()  # rows of each part that tensor ranks divide by itself; (): each source is one
    precise: bool = False  # a matrix is never quantised, a vector is float32 in a model of any dtype

    @property
    def kind(self) -> ParameterKind:
        """Norms, biases and the taps of convolutions [channels, 1, taps] are vectors; a gated matrix is two, stacked:
        the gate, then what it gates; embedding and head are the vocabulary's; a router's, a shared expert's gate,
        learned positions and an encoder's tables, which are the matrices outside its layers, stay in full
        precision."""
        if len(self.shape) != 2:
            return "vector"
        if self.name.startswith(_TABLES):
            return "table"
        if self.name in ("embedding.weight", "head.weight"):
            return "vocabulary"
        if self.precise or self.name.endswith((".router.weight", ".shared.gate.weight", "embedding.positions.weight")):
            return "router"
        return "gated" if self.name.endswith(".gate_up.weight") else "matrix"

    @property
    def float32(self) -> bool:
        """Whether a vector is float32 in a model of any dtype. Rounded, a bias of scores would choose other experts;
        sinks are added to scores in float32."""
        return self.name.endswith((".choice.bias", ".sinks.weight")) or (self.precise and self.kind == "vector")

    @property
    def stored(self) -> tuple[WeightFormat | None, ...]:
        """The codes of the tensors that it is made of, each once: see TensorSource.stored."""
        return _each_once(self.sources)

    @property
    def sections(self) -> tuple[tuple[int, tuple[WeightFormat | None, ...]], ...]:
        """The rows that have a format of their own in memory, as (rows, codes): neighbours of one format. Gated halves
        interleave, and each expert is found by its size, so these have one format for all rows."""
        if self.kind != "matrix" or self.experts > 1:
            return ((self.shape[0], self.stored),)
        alike = [tuple(group) for _, group in groupby(self.sources, key=lambda source: source.stored)]
        return tuple((sum(source.rows for source in group), _each_once(group)) for group in alike)

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size

    def of(self, sources: Sequence[TensorSource]) -> "Parameter":
        """The parameter with the rows of these sources, one after the other."""
        placed, start = [], 0
        for source in sources:
            placed.append(replace(source, start=start))
            start += source.rows
        return replace(self, shape=(start, *self.shape[1:]), sources=tuple(placed))


def _each_once(sources: Sequence[TensorSource]) -> tuple[WeightFormat | None, ...]:
    """The codes of tensors by name, those with floats first. Two names may mean one format, and both are kept."""
    named = {"" if source.stored is None else source.stored.name: source.stored for source in sources}
    return tuple(fmt for _, fmt in sorted(named.items(), key=lambda pair: pair[0]))


def joined(
    name: str, columns: tuple[int, ...], sources: Sequence[TensorSource], parts: tuple[int, ...] = (), experts: int = 1
) -> Parameter:
    """A parameter whose rows are those of `sources`, one after the other; `columns` is its shape after dimension 0."""
    return Parameter(name, (0, *columns), (), experts, parts=parts).of(sources)


def stacked(name: str, columns: tuple[int, ...], *sources: tuple[str, int], experts: int = 1) -> Parameter:
    """`joined`, of whole tensors: (name, rows) of each."""
    placed, start = [], 0
    for source, rows in sources:  # 50,000 of a large mixture, so each is made once
        placed.append(TensorSource(source, start, rows))
        start += rows
    return Parameter(name, (start, *columns), tuple(placed), experts)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model, or one rank's part of it (see shard.py); with `encoder`, an encoder. With
    `transformers`, parameters are the checkpoint's tensors, and of each layer only its attention's sizes count.

    A KV group is the layers that see the same tokens and keep the same of each: they share a block table. `windows[g]`
    says which tokens a query of group g sees. Layers with a state (see PageShape) are in none. A rank has all groups,
    also those without a layer of its own. Its embedding and head, if it has them, are rows `vocab_start` to
    `vocab_start + vocab_size` of the model's `vocab_total`. If there is a parameter `embedding.positions.weight`
    [max_position, hidden], it is added to the embedding.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    windows: tuple[Window, ...]  # one per KV group, ascending
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    norm_offset: float = 0.0  # the model adds it to every norm's weight, in fp32: Gemma stores weight - 1
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size), rounded to the weights' dtype
    layer_norm: bool = False  # norms are LayerNorm, not RMSNorm
    residual_scale: float = 1.0  # what attention and the MLP add to the residual is multiplied by it
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits are bounded: softcap * tanh(logit / softcap); 0: not
    checkpoint_dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    ignored_tensors: tuple[str, ...] = ()  # fnmatch patterns of checkpoint tensors that carry no weights of ours
    duplicates: tuple[tuple[str, str], ...] = ()  # (tensor, the source that it must equal if it is stored): a tied head
    base_prefix: str = ""  # of tensor names; some checkpoints leave it out
    scheme: Scheme | None = None  # in which the checkpoint stores quantised matrices
    vocab_start: int = 0
    vocab_total: int = 0  # 0: vocab_size
    encoder: EncoderSpec | None = None  # the model is an encoder, not a decoder
    transformers: TransformersCode | None = None  # executes the model, but for attention
    pooling: PoolingFacts | None = None  # the model gives vectors instead of text

    @property
    def vocabulary(self) -> int:
        """Tokens of the whole model: the width of its logits."""
        return self.vocab_total or self.vocab_size

    @property
    def has_head(self) -> bool:
        """Whether this rank has the final norm and the head, as every rank of the last stage does."""
        return self.transformers is not None or any(parameter.name == "norm.weight" for parameter in self.parameters)

    @property
    def packed(self) -> bool:
        """Whether our kernels multiply the layers' matrices, and so decide how these lie in memory."""
        return self.encoder is None and self.transformers is None

    def group_layers(self, group: int) -> list[int]:
        """Indices of the layers in a KV group that have keys and values of their own. A layer's place in the list is
        its place in the group's page."""
        layers = enumerate(self.layers)
        return [i for i, layer in layers if layer.kv_group == group and self.kv_layer(i) == i]

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: mostly itself."""
        other: int | None = getattr(self.layers[layer].attention, "kv_layer", None)
        return layer if other is None else other

    @property
    def whole_stages(self) -> bool:
        """Whether layers read what another stage would have: keys and values, or the embedding."""
        return any(each.per_layer or self.kv_layer(i) != i for i, each in enumerate(self.layers))

    def group_page(self, group: int) -> PageShape:
        """The page of each layer of a KV group, which is the same for all. Its width is 0 if there is no layer."""
        layers = self.group_layers(group)
        return self.layers[layers[0]].attention.page if layers else PageShape(1, 1, 0)

    @property
    def state_layers(self) -> list[int]:
        """Indices of the layers with a state. A layer's place in the list is its place in a sequence's states."""
        return self.group_layers(len(self.windows))

    @property
    def state_width(self) -> int:
        """float32 elements of a state, which is as large in all layers that have one; 0: there are none."""
        return self.group_page(len(self.windows)).width

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The width of a row that each layer keeps: the sizes that attention kernels must support."""
        return tuple(page.width for layer in self.layers if not (page := layer.attention.page).state)

    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)
