"""The kind of layers that keep a state of a sequence instead of keys and values: see attention.py."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from penstock.config.facts import PageShape
from penstock.families.kinds.attention import AttentionMemory, TensorSplit
from penstock.families.spec import Parameter, TensorSource, joined, stacked


@dataclass(frozen=True)
class RecurrentSpec:
    """A gated delta net (Yang et al., "Gated Delta Networks", 2024) or, without `delta`, Mamba 2 (Dao and Gu,
    "Transformers are SSMs", 2024). Each value head has a matrix that decays, and to which a token adds its value at its
    key; a delta net first subtracts what the key reads. A short causal convolution comes before.

    Parameters of layer i; `input` and `output` may be quantised, the others are in full precision, or float32:
    - `input.weight` [2 * key_width + 2 * value_width, hidden]: queries, keys, values, and gates of the output;
    - `rates.weight` [rates, hidden]: of a delta net how far each head is corrected, and how much of it stays;
    - `conv.weight` [channels, 1, taps], with conv_bias `conv.bias`; `decay.weight` and `step.bias` [value_heads];
    - `state_norm.weight`, of a delta net [value_dim], else [value_width], with `skip.weight` [value_heads];
    - `output.weight` [hidden, value_width]; with projection_bias `input.bias`, `rates.bias`, `output.bias`.
    """

    key_heads: int
    value_heads: int  # those that share a key head follow each other; if `tiled`, they are key_heads apart
    key_dim: int
    value_dim: int
    taps: int  # of the convolution
    norm_groups: int  # equal parts of the output that are normed
    delta: bool = True
    conv_bias: bool = False
    projection_bias: bool = False
    tiled: bool = False

    causal: ClassVar[bool] = True
    rotary: ClassVar[None] = None

    @property
    def num_heads(self) -> int:
        return self.value_heads

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def page(self) -> PageShape:
        """The matrices of all heads, and the last inputs of the convolution."""
        return PageShape(1, 1, self.value_width * self.key_dim + (self.taps - 1) * self.channels, state=True)

    @property
    def memory(self) -> AttentionMemory:
        """The inputs as projected, and in float32 as convolved; the rates; the output in float32 and as it is."""
        return AttentionMemory(3 * self.channels + 4 * self.value_width + 4 * self.value_heads)

    @property
    def tensor_split(self) -> TensorSplit:
        return TensorSplit(sizes=((1, "model's states"),))

    def shard(self, ranks: int, rank: int) -> "RecurrentSpec":
        return self


def delta_net_parameters(
    ours: str, theirs: str, spec: RecurrentSpec, hidden: int, *, by_key_head: bool, divided: bool = False
) -> list[Parameter]:
    """The parameters of a layer's delta net. With `by_key_head` two tensors hold queries, keys, values and gates, and
    the rates, those of each key head together; else there are four. With `divided` the gates are a tensor of their
    own in any case, as in GGUF files."""
    shared = spec.value_heads // spec.key_heads
    sizes = {"qkv": spec.channels, "z": spec.value_width}
    inputs = [TensorSource(f"{theirs}in_proj_{name}", 0, rows) for name, rows in sizes.items()]
    if by_key_head:
        widths = (spec.key_dim, spec.key_dim, shared * spec.value_dim, shared * spec.value_dim)
        inputs = inputs if divided else _by_head(f"{theirs}in_proj_qkvz", spec.key_heads, widths)
        rates = _by_head(f"{theirs}in_proj_ba", spec.key_heads, (shared, shared))
    else:
        rates = [TensorSource(f"{theirs}in_proj_{name}", 0, spec.value_heads) for name in "ba"]
    return _parameters(ours, theirs, spec, hidden, inputs, rates, [TensorSource("conv1d", 0, spec.channels)])


def _by_head(tensor: str, heads: int, widths: tuple[int, ...]) -> list[TensorSource]:
    """The sources of several parts, the first of all heads first, from a tensor that has all parts of a head
    together."""
    each = sum(widths)
    firsts = [sum(widths[:part]) for part in range(len(widths))]
    return [
        TensorSource(tensor, 0, width, head * each + first)
        for first, width in zip(firsts, widths, strict=True)
        for head in range(heads)
    ]


def mamba_parameters(ours: str, theirs: str, spec: RecurrentSpec, hidden: int) -> list[Parameter]:
    """The parameters of a layer's Mamba 2. One tensor holds gates, values, keys, queries and rates."""
    keys, values, name = spec.key_width, spec.value_width, f"{theirs}in_proj"
    parts = ((keys, 2 * values + keys), (keys, 2 * values), (values, values), (values, 0))
    inputs = [TensorSource(name, 0, rows, first) for rows, first in parts]
    rates = [TensorSource(name, 0, spec.value_heads, 2 * (values + keys))]
    channels = [TensorSource("conv1d", 0, rows, first - values) for rows, first in parts[:3]]
    return _parameters(ours, theirs, spec, hidden, inputs, rates, channels)


def _parameters(
    ours: str,
    theirs: str,
    spec: RecurrentSpec,
    hidden: int,
    inputs: Sequence[TensorSource],
    rates: Sequence[TensorSource],
    channels: Sequence[TensorSource],
) -> list[Parameter]:
    """The parameters of a layer with these sources, whose names lack their ends. `channels` are those of the
    convolution, whose names lack `theirs` too."""
    heads, norm = spec.value_heads, spec.value_dim if spec.delta else spec.value_width
    vectors = [
        ("decay.weight", "A_log", heads),
        ("step.bias", "dt_bias", heads),
        ("state_norm.weight", "norm.weight", norm),
    ]
    vectors += [] if spec.delta else [("skip.weight", "D", heads)]
    precise = [stacked(ours + name, (), (theirs + source, size)) for name, source, size in vectors]
    parameters = []
    kinds = ("weight", "bias") if spec.projection_bias else ("weight",)
    for kind in kinds:
        columns = (hidden,) if kind == "weight" else ()
        parameters.append(joined(f"{ours}input.{kind}", columns, _named(inputs, kind)))
        into = precise if kind == "weight" else parameters  # a bias is kept as the packed matrix keeps it
        into.append(joined(f"{ours}rates.{kind}", columns, _named(rates, kind)))
        columns = (spec.value_width,) if kind == "weight" else ()
        parameters.append(stacked(f"{ours}output.{kind}", columns, (f"{theirs}out_proj.{kind}", hidden)))
    for kind in ("weight", "bias") if spec.conv_bias else ("weight",):
        sources = [replace(source, name=f"{theirs}{source.name}") for source in channels]
        precise.append(joined(f"{ours}conv.{kind}", (1, spec.taps) if kind == "weight" else (), _named(sources, kind)))
    return parameters + [replace(each, precise=True) for each in precise]


def _named(sources: Sequence[TensorSource], kind: str) -> list[TensorSource]:
    return [replace(source, name=f"{source.name}.{kind}") for source in sources]
