"""Kinds of attention as data: the page they use, the memory they need, and how tensor ranks divide them.

A kind is a frozen dataclass that is an AttentionSpec; models/attention.py has the code that executes it. The window is
not part of a kind: it belongs to the layer's KV group (see ModelSpec).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

from penstock.config.facts import PageShape, QueryTemperature

# How a parameter is divided among tensor ranks: "whole" on each; "rows" or "columns" of the matrix; "once": on the
# first rank alone, because the ranks' outputs are summed; "experts": whole experts of a mixture.
Cut = Literal["whole", "rows", "columns", "experts", "once"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the first `dims` elements of a head, and what else positions do to queries.

    Frequencies are theta ** (-2i / dims), then changed by `scaling`:
    - "off": all 0, as nothing is rotated;
    - "linear": divided by `factor`;
    - "llama3": wavelengths above original_max_position / low_freq_factor divided by `factor`, those below
      original_max_position / high_freq_factor kept, and a smooth blend between;
    - "yarn": those that turn fewer than `slow` times in original_max_position divided by `factor`, those that turn more
      than `fast` times kept, and a linear blend between (Peng et al., "YaRN", 2023);
    - "proportional": those after the first `turning` are 0 (Gemma 4);
    - "longrope": divided by `short_factors`, one each, in a model served with at most original_max_position, else by
      `long_factors` (Ding et al., "LongRoPE", 2024).

    The kernels rotate the halves of a head (the "NeoX" layout). A checkpoint's rows are in that order, except for the
    elements that are not rotated and, with `interleaved`, pairs that lie side by side: see rows.py.
    """

    theta: float = 10000.0
    scaling: Literal["none", "off", "linear", "llama3", "yarn", "longrope", "proportional"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    dims: int = 0  # 0: the whole head
    interleaved: bool = False
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True  # the ends of the blend to whole frequencies
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    turning: int = 0
    temperature: QueryTemperature | None = None  # of queries, which are multiplied by it after they are rotated


@dataclass(frozen=True)
class AttentionMemory:
    """Elements that attention needs besides its pages and the weights in the checkpoint."""

    per_token: int = 0  # of a step: tensors alive at once, without the hidden states
    per_context_token: int = 0  # copied out of the pages before attention, on a CPU
    repeated_weights: int = 0  # vectors that are stored once and held once for each head


@dataclass(frozen=True)
class TensorSplit:
    """How tensor ranks divide a kind's parameters."""

    sizes: tuple[tuple[int, str], ...] = ()  # each must be a multiple of the ranks; with a name: (8, "{} KV heads")
    columns: tuple[tuple[int, str], ...] = ()  # (columns, name) of each matrix that is cut by columns
    cuts: Mapping[str, Cut] = field(default_factory=dict)  # parameter, after `layers.N.`, to its cut


class AttentionSpec(Protocol):
    """A kind of attention with its sizes in one layer, or in one rank's part of the layer."""

    @property
    def num_heads(self) -> int: ...

    @property
    def causal(self) -> bool:
        """Whether a token sees none after it: only then can a prompt be computed in chunks."""

    @property
    def page(self) -> PageShape:
        """The layer's part of a page of its KV group, or its state."""

    @property
    def rotary(self) -> tuple[RopeSpec, int] | None:
        """(rope, head size) of the rotation that the layer applies. Layers with equal ones share its computation."""

    @property
    def memory(self) -> AttentionMemory: ...

    @property
    def tensor_split(self) -> TensorSplit: ...

    def shard(self, ranks: int, rank: int) -> "AttentionSpec":
        """The part of tensor rank `rank`. `ranks` divides all of `tensor_split.sizes`."""


QKNorm = Literal["", "heads", "whole", "centered", "unit"]

_GROUPED_QUERY_CUTS: Mapping[str, Cut] = {
    "qkv.weight": "rows",
    "qkv.bias": "rows",
    "output.weight": "columns",
    "output.bias": "once",
    "q_norm.weight": "whole",
    "k_norm.weight": "whole",
    "gate.weight": "rows",
    "gate.bias": "rows",
    "sinks.weight": "rows",
}
# How ranks divide norms whose heads have separate weights.
_OWN_NORMS: Mapping[str, Cut] = MappingProxyType({"q_norm.weight": "rows", "k_norm.weight": "rows"})


@dataclass(frozen=True)
class GroupedQuerySpec:
    """Causal softmax attention whose query heads share KV heads in groups; multi-head attention has groups of one.

    Parameters of layer i:
    - `qkv.weight` [(num_heads + 2 num_kv_heads) * head_dim, hidden], `output.weight` [hidden, num_heads * head_dim];
    - with qkv_bias `qkv.bias`; with output_bias `output.bias`;
    - with qk_norm "heads" `q_norm.weight` and `k_norm.weight`, [head_dim] each; with "whole" and "centered" one for
      each element; with "unit" none;
    - with sinks `sinks.weight` [num_heads];
    - with gate `gate.weight` [num_heads * head_dim, hidden] and, with qkv_bias, its bias.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float  # of the products of queries and keys
    qkv_bias: bool = False
    output_bias: bool = False
    # Before rope: RMSNorm of each head, with weights or ("unit") without, or of all of q and of k; or LayerNorm
    # ("centered") of each head.
    qk_norm: QKNorm = ""
    softcap: float = 0.0  # scores are bounded: softcap * tanh(score / softcap); 0: not
    sinks: bool = False  # each head has the score of a further position without a value
    gate: bool = False  # the output is multiplied by the sigmoid of a product of the input
    value_norm: bool = False  # RMSNorm of each head of the values, without weights
    keys_are_values: bool = False  # a value is the key before norm and rope: one projection gives both
    kv_layer: int | None = None  # reads the keys and values of that layer, and has no projection and page of them

    causal: ClassVar[bool] = True

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim if self.kv_layer is None else 0

    @property
    def page(self) -> PageShape:
        return PageShape(2, self.num_kv_heads, self.head_dim)

    @property
    def rotary(self) -> tuple[RopeSpec, int]:
        return self.rope, self.head_dim

    @property
    def memory(self) -> AttentionMemory:
        """q, k and v twice, before and after rope, the output, and a gate; K and V gathered."""
        own = self.kv_layer is None
        key_heads = self.num_kv_heads if own else 0
        stored = {"heads": 1 + own, "unit": 0}.get(self.qk_norm, self.num_heads + key_heads)
        repeated = (self.num_heads + (1 + self.value_norm) * key_heads - stored) * self.head_dim
        wide = (5 if self.gate else 3) * self.query_width
        return AttentionMemory(wide + 4 * self.kv_width, 2 * self.kv_width, repeated)

    @property
    def tensor_split(self) -> TensorSplit:
        together = ((1, "norm over all heads"),) if self.qk_norm == "whole" else ()  # each rank needs all heads
        cuts = {**_GROUPED_QUERY_CUTS, **(_OWN_NORMS if self.qk_norm == "centered" else {})}
        return TensorSplit(
            sizes=(*together, (self.num_kv_heads, "{} KV heads"), (self.num_heads, "{} attention heads")),
            columns=((self.query_width, "output"),),
            cuts=cuts,
        )

    def shard(self, ranks: int, rank: int) -> "GroupedQuerySpec":
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            output_bias=self.output_bias and rank == 0,
        )
