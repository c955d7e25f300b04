"""The sizes of a model, known before its weights are read: enough to size memory and to choose defaults."""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Literal

import msgspec

from penstock.config.weights import WeightFormat
from penstock.messages import Window

SCALE_BYTES = 4  # int8 and fp8 elements have a float32 scale for each row of a page


class PageShape(msgspec.Struct, frozen=True):
    """The part of a KV page that one layer uses: `planes` x `heads` rows of `width` elements for each token.

    Full attention has planes for keys and values; latent attention has one plane and one head. A layer that keeps
    nothing has width 0. A layer with a state has no page: it keeps `width` float32 elements for a sequence of any
    length.
    """

    planes: int
    heads: int
    width: int
    state: bool = False

    def size(self, block_size: int, element_size: int) -> tuple[int, int, int, int]:
        """[planes, heads, rows, width] in elements of `element_size` bytes. One-byte elements are quantised: each row
        is followed by its scale."""
        scale = SCALE_BYTES if element_size == 1 and self.width else 0
        return self.planes, self.heads, block_size, self.width + scale

    def block_bytes(self, block_size: int, element_size: int) -> int:
        return prod(self.size(block_size, element_size)) * element_size


class QueryTemperature(msgspec.Struct, frozen=True):
    """The queries of a token at position p are multiplied by 1 + scale * log(1 + (p + first) // every)."""

    every: int
    scale: float
    first: int = 0


class GroupFacts(msgspec.Struct, frozen=True):
    """A KV group: layers that share a block table."""

    window: Window
    layers: int  # in this rank's part of the model; may be 0
    page: PageShape  # of each layer


class MatrixFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of one shape and kind, as the model executes them. q, k and v are one matrix if they have one format,
    else a matrix for each format (see Parameter.sections)."""

    rows: int
    columns: int
    count: int = 1
    bias: bool = False
    gated: bool = False  # two of the same size, stacked
    vocabulary: bool = False  # the embedding or the head: no product of every token
    router: bool = False  # in full precision however the others are quantised; an encoder's tables are both
    experts: int = 1  # each matrix is so many of this shape, stacked;
    share: float = 1.0  # a token uses this share of them
    sensitive: bool = False  # gets more bits than others where weights are quantised
    stored: tuple[WeightFormat | None, ...] = ()  # the codes of the tensors that it is made of; empty: all floats


class MixtureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The widest mixture of experts among a model's layers."""

    experts: int
    per_token: int
    intermediate_size: int  # of an expert


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes one vector of a text: an embedding, or the logits of a classifier's labels."""

    task: Literal["embed", "classify"]
    mode: Literal["cls", "mean", "last", "max"]  # which tokens' hidden states it is made of
    width: int  # numbers of the vector
    encoder: bool  # the model reads in both directions: a text is computed in one step, and nothing is kept of it
    normalize: bool = False  # embeddings have length 1
    prompts: Mapping[str, str] = MappingProxyType({})  # by name: a text that is put before each input
    default_prompt: str = ""  # its name; "": none
    labels: tuple[str, ...] = ()  # of a classifier
    activation: Literal["sigmoid", "softmax"] = "sigmoid"  # makes scores of a classifier's logits

    @property
    def whole_prompts(self) -> bool:
        """Whether a text must be computed in one step, and without what the prefix cache has of it."""
        return self.encoder or self.mode != "last"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, or of one rank's part of it. Widths are those of its widest layer, in elements per token."""

    family: str
    num_parameters: int
    matrices: tuple[MatrixFacts, ...]
    vector_elements: int  # of all norms; biases belong to their matrices
    float32_elements: int = 0  # of vectors that are float32 in any dtype
    num_layers: int
    vocab_size: int  # of the whole model
    hidden_size: int
    widest_mlp: int  # intermediate_size, of a shared expert too
    widest_attention: int  # tensors of attention that are alive at once
    widest_gathered: int  # per token of context: copied out of the pages before attention, on a CPU
    groups: tuple[GroupFacts, ...]
    max_position: int
    state_elements: int = 0  # float32 elements that a sequence keeps in layers with a state; 0: there are none
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...] = ()
    mixture: MixtureFacts | None = None
    pooling: PoolingFacts | None = None  # of a model that gives vectors instead of text
    transformers: str = ""  # the architecture, if transformers' code executes the model
    samples: bool = True  # whether this rank has whole logits, and samples
    head_part: int = 0  # columns of the logits that this rank computes if others compute the rest; else 0
    isa: str = ""  # the instruction set of the native kernels that read the weights, if it is known

    @property
    def parameters_per_token(self) -> float:
        """Parameters of the layers' matrices that a token is multiplied with: of experts, those that it uses."""
        return sum(m.count * m.experts * m.share * m.rows * m.columns for m in self.matrices if not m.vocabulary)

    @property
    def latents(self) -> bool:
        """Whether a token keeps one row that serves as key and as value (see families/kinds/latent.py)."""
        return any(group.page.planes == 1 and group.page.width for group in self.groups)

    def for_kernels(self, isa: str) -> "ModelFacts":
        """The facts for native kernels of an instruction set; "" if there are none: nothing decodes GGUF files' codes
        then."""
        return msgspec.structs.replace(self, isa=isa) if isa else self.without_codes()

    def without_codes(self) -> "ModelFacts":
        """The facts for kernels that read no codes of GGUF files: the matrices are floats."""
        matrices = tuple(msgspec.structs.replace(matrix, stored=()) for matrix in self.matrices)
        return msgspec.structs.replace(self, matrices=matrices)
