"""What is known of a model before its weights are read: enough to size memory and fill in defaults."""

import msgspec


class MatrixFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of one shape and kind, as the model executes them (q, k and v are one)."""

    rows: int
    columns: int
    count: int = 1
    bias: bool = False
    gated: bool = False  # two of the same size, stacked
    vocabulary: bool = False  # the embedding or the head
    router: bool = False  # in full precision however the others are quantised
    experts: int = 1  # each of the `count` is so many of the shape,
    share: float = 1.0  # and a token goes through this share of them


class MixtureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The widest mixture of experts among a model's layers."""

    experts: int
    per_token: int
    intermediate_size: int  # of an expert


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, or of one rank's part of it. Widths are those of its widest layer, in elements per token."""

    family: str
    num_parameters: int
    matrices: tuple[MatrixFacts, ...]
    vector_elements: int  # of all norms; biases belong to their matrices
    num_layers: int
    vocab_size: int  # of the whole model
    hidden_size: int
    widest_mlp: int  # intermediate_size, of a shared expert too
    widest_query: int  # query heads x head size
    widest_kv: int  # KV heads x head size
    windows: tuple[int, ...]  # per KV group the tokens a query sees, itself included; 0: all
    kv_elements_per_token: tuple[int, ...]  # per KV group: K and V of all its layers
    kv_vectors_per_token: tuple[int, ...]  # the same in vectors of a head's size
    max_position: int
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...] = ()
    mixture: MixtureFacts | None = None
    samples: bool = True  # whether logits are whole here, and the sampler beside them
    head_part: int = 0  # columns of the logits that are computed here, where other ranks compute the rest
