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
    """A mixture of experts. A router scores all experts for each token. The token goes through the
    `experts_per_token` experts with the largest scores, which are MLPs, and their outputs are added, weighted by these
    scores. A score is the softmax over the logits of all experts or, with `sigmoid`, the sigmoid of one. A shared
    expert processes every token.

    Parameters of layer i (it has no `gate_up` and `down` of a dense MLP, unless it is `beside_mlp`):
    - `router.weight` [num_experts, hidden], never quantised; with choice_bias `choice.bias` [num_experts], in float32;
    - with biases `router.bias`, `experts.gate_up.bias` and `experts.down.bias`;
    - `experts.gate_up.weight` [held * 2 * intermediate_size, hidden]: for each expert its gate rows, then its up rows;
      if the layer is not gated, `experts.up.weight` [held * intermediate_size, hidden] instead;
    - `experts.down.weight` [held * hidden, intermediate_size];
    - with experts_hidden, which replaces hidden in the shapes of `experts.*`, `experts_in.weight`
      [experts_hidden, hidden] and `experts_out.weight` [hidden, experts_hidden], which the experts' sum goes through;
    - with a shared expert `shared.gate_up.weight` (not gated: `shared.up.weight`) and `shared.down.weight`; with
      shared_gate `shared.gate.weight` [1, hidden], never quantised;
    - beside an MLP the norms' weights [hidden] `router_norm` (its result is divided by sqrt(hidden)), `experts_norm`,
      `experts_post_norm`, `dense_post_norm`, and `expert_scales.weight` [num_experts], in float32.
    """

    num_experts: int  # on all ranks together
    experts_per_token: int
    intermediate_size: int  # of an expert
    normalize: bool  # the weights of a token's experts are made to sum to 1
    shared_intermediate_size: int = 0  # 0: there is no shared expert
    shared_gate: bool = False  # the shared expert's output is scaled by a sigmoid of the token
    sigmoid: bool = False
    groups: int = 1  # experts are divided into this many groups of equal size
    kept_groups: int = 1  # a token's experts are in this many groups, those whose best expert has the largest score
    by_pairs: bool = False  # groups are compared by the sum of their two largest scores instead
    weight_scale: float = 1.0  # the weights of a token's experts are multiplied by it
    choice_bias: bool = False  # a bias is added to the scores for the choice of experts, not for their weights
    biases: bool = False  # the router and the experts have biases
    weigh_inputs: bool = False  # an expert's input is multiplied by its weight, not its output
    beside_mlp: bool = False  # the layer has an MLP, too: see LayerSpec
    experts_hidden: int = 0  # the size of the experts' inputs and outputs; 0: the model's hidden size
    first_expert: int = 0  # this rank holds consecutive experts, from this one
    local_experts: int = 0  # how many it holds; 0: all. Experts on other ranks contribute nothing here

    @property
    def held(self) -> int:
        """The number of experts that this rank holds."""
        return self.local_experts or self.num_experts


@dataclass(frozen=True)
class PerLayerSpec:
    """A layer's own embedding of each token, which is added to the residual x after the MLP (Gemma 3n, Gemma 4).

    embedding = (norm(projection of the model's embedding) + the token's row of the table) / sqrt(2)
    x += post_norm(output(embedding * activation(gate(x))))

    Parameters of layer i, each after `per_layer.`: `table.weight` [rows, width], `projection.weight` and `gate.weight`
    [width, hidden], `norm.weight` [width], `output.weight` [hidden, width], `post_norm.weight` [hidden].
    """

    width: int
    rows: int  # tokens in the table
    layer: int  # the checkpoint stacks table and projection of all layers: the index of this layer in them
    stacked: str  # the name prefix of the stacked tensors


@dataclass(frozen=True)
class LayerSpec:
    """One decoder block: attention, then an MLP or a mixture of experts (`moe`). Each has a norm before it and, with
    `post_norms`, one after it.

    With `moe.beside_mlp` the block has both. They read the same residual, and the router and the experts have norms of
    their own. The outputs of both are normed and added. The weights of a token's experts are multiplied by
    `expert_scales`.

    Parameters of layer i, besides those of its attention:
    - `attention_norm.weight` and `mlp_norm.weight` [hidden], with a bias if the model's norms have one;
    - with post_norms `attention_post_norm.weight` and `mlp_post_norm.weight` [hidden];
    - of an MLP `gate_up.weight` [2 * intermediate_size, hidden] (not gated: `up.weight`), and `down.weight`; with
      mlp_bias their biases;
    - of a mixture see MoESpec.
    """

    attention: AttentionSpec
    intermediate_size: int  # of the MLP; 0: there is none
    kv_group: int  # index into ModelSpec.windows; len(windows) for a layer with a state
    activation: Activation = "silu"
    mlp_bias: bool = False
    pre_norms: bool = True
    post_norms: bool = False  # norm the output of attention and of the MLP before it joins the residual
    gated: bool = True  # False: down(activation(up(x)))
    parallel: bool = False  # the MLP reads the same residual as attention; there are no post_norms
    shared_norm: bool = False  # in a parallel block, attention and MLP share one norm, `attention_norm`
    moe: MoESpec | None = None
    per_layer: PerLayerSpec | None = None
    output_scale: bool = False  # the hidden states after the block are multiplied by `output_scale.weight` [1]

    @property
    def has_mlp(self) -> bool:
        """Whether there is an MLP or a mixture. Without, the block ends after attention and has no `mlp_norm`."""
        return self.intermediate_size > 0 or self.moe is not None

    @property
    def sums(self) -> int:
        """The number of all-reduces between tensor ranks."""
        beside = self.moe is not None and self.moe.beside_mlp
        return 1 if self.parallel or not self.has_mlp else 2 + beside


@dataclass(frozen=True)
class EncoderSpec:
    """The settings that all layers of an encoder share, and those of its embeddings and its classifier.

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
    """The code of transformers that executes a model of a family that Penstock does not have."""

    architecture: str  # the name of its class
    version: str  # of transformers
    config: str  # its configuration as JSON


@dataclass(frozen=True)
class TensorSource:
    """The part of a checkpoint tensor that fills rows `start` to `start + rows` of a parameter.

    By default it is the whole tensor. Rows can be every `step`-th one from `first_row`, and columns `columns` (0: all)
    from `first_column`. With `transposed`, the tensor is transposed first. `order` permutes the rows within each head:
    it lists runs of rows as (first row, count, step). A name that ends in `[i]` means the i-th matrix of a tensor that
    holds several.
    """

    name: str
    start: int
    rows: int
    first_row: int = 0
    first_column: int = 0
    columns: int = 0
    stored: WeightFormat | None = None  # the format of quantised values in the checkpoint; None for floats
    transposed: bool = False
    order: tuple[tuple[int, int, int], ...] = ()
    step: int = 1

    @property
    def end_row(self) -> int:
        """The row of the tensor after the last one that is used."""
        return self.first_row + (self.rows - 1) * self.step + 1


@dataclass(frozen=True)
class Parameter:
    """A tensor as the model uses it. Fused ones (qkv, gate_up) have several sources, stacked along dimension 0. A
    scalar has one row."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]
    experts: int = 1  # number of equal matrices that are stacked
    sensitive: bool = False  # gets more bits than others where weights are quantised
    parts: tuple[int, ...] = ()  # rows of each part that tensor ranks divide by itself; (): each source is a part
    precise: bool = False  # a matrix is never quantised, a vector is float32 in a model of any dtype

    @property
    def kind(self) -> ParameterKind:
        """How the parameter is stored and multiplied with.

        - vector: norms, biases and the taps of convolutions [channels, 1, taps];
        - gated: two matrices, stacked: the gate, then what it gates;
        - vocabulary: the embedding and the head;
        - router: a router, a shared expert's gate, learned positions and `precise` matrices: never quantised;
        - table: an encoder's matrices outside its layers: never quantised;
        - matrix: all others.
        """
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
        """Whether the parameter is float32 in a model of any dtype. A rounded choice bias would choose other experts.
        Sinks are added to scores in float32."""
        return self.name.endswith((".choice.bias", ".sinks.weight")) or (self.precise and self.kind == "vector")

    @property
    def stored(self) -> tuple[WeightFormat | None, ...]:
        """The formats of its sources, each once: see TensorSource.stored."""
        return _each_once(self.sources)

    @property
    def sections(self) -> tuple[tuple[int, tuple[WeightFormat | None, ...]], ...]:
        """The parts with a format of their own in memory, as (rows, formats): neighbouring sources of one format. A
        gated matrix (its halves interleave) and stacked experts (each is found by its size) have one format for all."""
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
        """Returns this parameter with the rows of `sources`, one after the other, in place of its own."""
        placed, start = [], 0
        for source in sources:
            placed.append(replace(source, start=start))
            start += source.rows
        return replace(self, shape=(start, *self.shape[1:]), sources=tuple(placed))


def _each_once(sources: Sequence[TensorSource]) -> tuple[WeightFormat | None, ...]:
    """Returns the formats of the sources, sorted by name, each name once; None (floats) is first."""
    named = {"" if source.stored is None else source.stored.name: source.stored for source in sources}
    return tuple(fmt for _, fmt in sorted(named.items(), key=lambda pair: pair[0]))


def joined(
    name: str, columns: tuple[int, ...], sources: Sequence[TensorSource], parts: tuple[int, ...] = (), experts: int = 1
) -> Parameter:
    """Returns a parameter with the rows of `sources`, one after the other. `columns` is its shape after dimension 0."""
    return Parameter(name, (0, *columns), (), experts, parts=parts).of(sources)


def stacked(name: str, columns: tuple[int, ...], *sources: tuple[str, int], experts: int = 1) -> Parameter:
    """As `joined`, for whole tensors, each given as (name, rows)."""
    placed, start = [], 0
    for source, rows in sources:  # a large mixture has 50,000, so each object is made only once
        placed.append(TensorSource(source, start, rows))
        start += rows
    return Parameter(name, (start, *columns), tuple(placed), experts)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model, or one rank's part of it (see shard.py); with `encoder`, an encoder. With
    `transformers`, parameters are the checkpoint's tensors, and only the attention of each layer is described.

    The layers of a KV group share a block table: they see the same tokens and have pages of the same shape.
    `windows[g]` says which tokens a query of group g sees. Layers with a state (see PageShape) are in no group. A rank
    has all groups, also those without a layer of its own.

    A rank's embedding and head, if it has them, are rows `vocab_start` to `vocab_start + vocab_size` of `vocab_total`.
    A parameter `embedding.positions.weight` [max_position, hidden], if there is one, is added to the embedding.
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
    residual_scale: float = 1.0  # the outputs of attention and MLP are multiplied by it, before they are added
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # logits become softcap * tanh(logit / softcap); 0: they are not bounded
    checkpoint_dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    ignored_tensors: tuple[str, ...] = ()  # fnmatch patterns of checkpoint tensors that are not loaded
    duplicates: tuple[tuple[str, str], ...] = ()  # (tensor, source that it must equal if stored): a tied head
    base_prefix: str = ""  # of tensor names; some checkpoints leave it out
    scheme: Scheme | None = None  # how the checkpoint stores quantised matrices
    vocab_start: int = 0
    vocab_total: int = 0  # 0: vocab_size
    encoder: EncoderSpec | None = None  # the model is an encoder, not a decoder
    transformers: TransformersCode | None = None  # executes the model, except attention
    pooling: PoolingFacts | None = None  # the model gives vectors instead of text

    @property
    def vocabulary(self) -> int:
        """The vocabulary size of the whole model, which is the width of its logits."""
        return self.vocab_total or self.vocab_size

    @property
    def has_head(self) -> bool:
        """Whether this rank has the final norm and the head, as every rank of the last stage does."""
        return self.transformers is not None or any(parameter.name == "norm.weight" for parameter in self.parameters)

    @property
    def packed(self) -> bool:
        """Whether our kernels multiply with the layers' matrices, and so define their layout in memory."""
        return self.encoder is None and self.transformers is None

    def group_layers(self, group: int) -> list[int]:
        """The layers of a KV group that have keys and values of their own. A layer's index in this list is its index in
        the group's page."""
        layers = enumerate(self.layers)
        return [i for i, layer in layers if layer.kv_group == group and self.kv_layer(i) == i]

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: mostly itself."""
        other: int | None = getattr(self.layers[layer].attention, "kv_layer", None)
        return layer if other is None else other

    @property
    def whole_stages(self) -> bool:
        """Whether a layer reads data that another pipeline stage would have: keys and values, or the embedding."""
        return any(each.per_layer or self.kv_layer(i) != i for i, each in enumerate(self.layers))

    def group_page(self, group: int) -> PageShape:
        """The page of each layer of a KV group, which is the same for all. Its width is 0 if there is no layer."""
        layers = self.group_layers(group)
        return self.layers[layers[0]].attention.page if layers else PageShape(1, 1, 0)

    @property
    def state_layers(self) -> list[int]:
        """The layers with a state. A layer's index in this list is its index in a sequence's states."""
        return self.group_layers(len(self.windows))

    @property
    def state_width(self) -> int:
        """The float32 elements of a state, the same for all layers with one; 0 if there are none."""
        return self.group_page(len(self.windows)).width

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The width of each layer's rows in the KV cache: the sizes that attention kernels must support."""
        return tuple(page.width for layer in self.layers if not (page := layer.attention.page).state)

    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)
