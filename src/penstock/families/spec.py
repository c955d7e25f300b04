"""A model as data: what its layers are and where its tensors come from. No torch: `plan` and the simulator size models
from this alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Kind = Literal["vector", "matrix", "gated", "vocabulary"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding over the whole head, halves rotated (the "NeoX" layout).

    Frequencies are theta ** (-2i / head_dim), then changed by `scaling`:
    - "linear": divided by `factor`;
    - "llama3": wavelengths above original_max_position / low_freq_factor divided by `factor`, those below
      original_max_position / high_freq_factor kept, and a smooth blend between.
    """

    theta: float = 10000.0
    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class LayerSpec:
    """One decoder block: attention and a gated MLP, each with a norm before and, with `post_norms`, one after."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    kv_group: int  # index into ModelSpec.windows
    rope: RopeSpec
    attention_scale: float
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before rope
    post_norms: bool = False  # Gemma: norm the block's output before it joins the residual


@dataclass(frozen=True)
class TensorSource:
    """Rows `start` to `start + rows` of a parameter come from the whole of checkpoint tensor `name`."""

    name: str
    start: int
    rows: int


@dataclass(frozen=True)
class Parameter:
    """A tensor as the model executes it. Fused ones (qkv, gate_up) name several sources, stacked along dimension 0."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[TensorSource, ...]

    @property
    def kind(self) -> Kind:
        """Norms and biases are vectors; a gated matrix is two, stacked: the gate, then what it gates; embedding and
        head are the vocabulary's."""
        if len(self.shape) == 1:
            return "vector"
        if self.name in ("embedding.weight", "head.weight"):
            return "vocabulary"
        return "gated" if self.name.endswith(".gate_up.weight") else "matrix"

    @property
    def size(self) -> int:
        size = 1
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only language model.

    `windows[g]` is the number of tokens a query of KV group g sees, itself included; 0 is all. Layers name their group.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    windows: tuple[int, ...]  # one per KV group, distinct and ascending: (0,), (4096,), (0, 512)
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

    def group_layers(self, group: int) -> list[int]:
        """Indices of the layers in a KV group, in order: the layer's place in its group's page."""
        return [i for i, layer in enumerate(self.layers) if layer.kv_group == group]

    def kv_elements_per_token(self, group: int) -> int:
        """Of K and V of all layers of a group."""
        layers = (self.layers[i] for i in self.group_layers(group))
        return sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)

    def num_parameters(self) -> int:
        return sum(parameter.size for parameter in self.parameters)

    def tensor_names(self) -> Iterator[str]:
        """Every checkpoint tensor the parameters are read from."""
        for parameter in self.parameters:
            for source in parameter.sources:
                yield source.name
