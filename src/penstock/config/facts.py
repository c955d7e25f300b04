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


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model. Widths are those of its widest layer, in elements per token."""

    family: str
    num_parameters: int
    matrices: tuple[MatrixFacts, ...]
    vector_elements: int  # of all norms; biases belong to their matrices
    num_layers: int
    vocab_size: int
    hidden_size: int
    widest_mlp: int  # intermediate_size
    widest_query: int  # query heads x head size
    widest_kv: int  # KV heads x head size
    windows: tuple[int, ...]  # per KV group the tokens a query sees, itself included; 0: all
    kv_elements_per_token: tuple[int, ...]  # per KV group: K and V of all its layers
    kv_vectors_per_token: tuple[int, ...]  # the same in vectors of a head's size
    max_position: int
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...] = ()
