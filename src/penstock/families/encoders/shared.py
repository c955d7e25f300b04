"""Encoders: models that read a text in both directions and give one vector, or scores, for the whole of it.

A ModelSpec with an EncoderSpec describes one. All have the parameters `tokens.weight`, `embedding_norm.*` and
`layers.N.*` (see `encoder_layer`). Learned positions add `positions.weight`, token types `types.weight`, a norm before
each part of a layer `norm.*`, and a classifier `classifier.dense.*`, `classifier.norm.*` and `classifier.out.*`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.config.facts import PageShape, PoolingFacts
from penstock.families.hf_config import HFConfig, checkpoint_dtype
from penstock.families.kinds.attention import AttentionMemory, RopeSpec, TensorSplit
from penstock.families.spec import EncoderActivation, EncoderSpec, LayerSpec, ModelSpec, Parameter, stacked
from penstock.messages import Window

MAX_LABELS = 4096

_ACTIVATIONS: dict[str, EncoderActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


@dataclass(frozen=True)
class BidirectionalSpec:
    """Softmax attention of each token over the whole text, or over `reach` tokens on either side."""

    num_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    reach: int = 0  # 0: the whole text

    causal: ClassVar[bool] = False

    @property
    def page(self) -> PageShape:
        return PageShape(1, 1, 0)

    @property
    def rotary(self) -> tuple[RopeSpec, int] | None:
        return None if self.rope is None else (self.rope, self.head_dim)

    @property
    def memory(self) -> AttentionMemory:
        """Counts q, k and v before rope and again after it, and the output."""
        return AttentionMemory(7 * self.num_heads * self.head_dim)

    @property
    def tensor_split(self) -> TensorSplit:
        """One part: encoders are not divided."""
        return TensorSplit(sizes=((1, "{} part of an encoder"),))

    def shard(self, ranks: int, rank: int) -> "BidirectionalSpec":
        return self


@dataclass(frozen=True)
class LayerNames:
    """The names of a layer's tensors in the checkpoint, after the layer's prefix. The tensors of `qkv` are stacked."""

    qkv: tuple[str, ...]
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


def activation(config: HFConfig, name: str, default: str) -> EncoderActivation:
    value = config.text(name, default)
    if value not in _ACTIVATIONS:
        raise config.unsupported(name, value, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[value]


def affine(name: str, sources: Sequence[str], rows: int, columns: int = 0, *, bias: bool = True) -> list[Parameter]:
    """Returns a weight [rows, columns], or [rows] if `columns` is 0, and its bias. The sources have equal parts."""
    each = rows // len(sources)
    shape = (columns,) if columns else ()
    kinds = {"weight": shape, "bias": ()} if bias else {"weight": shape}
    return [
        stacked(f"{name}.{kind}", shape, *((f"{source}.{kind}", each) for source in sources))
        for kind, shape in kinds.items()
    ]


def encoder_layer(
    config: HFConfig,
    index: int,
    prefix: str,
    names: LayerNames,
    *,
    gated: bool = False,
    attention_bias: bool = True,
    mlp_bias: bool = True,
    norm_bias: bool = True,
    attention_norm: bool = True,
) -> list[Parameter]:
    """The parameters of layer `index`: qkv, output, attention_norm, up, down and mlp_norm."""
    hidden, width = config.integer("hidden_size"), config.integer("intermediate_size")
    ours, up = f"layers.{index}.", width * (2 if gated else 1)
    parameters = affine(
        f"{ours}qkv", [f"{prefix}{name}" for name in names.qkv], 3 * hidden, hidden, bias=attention_bias
    )
    parameters += affine(f"{ours}output", [prefix + names.output], hidden, hidden, bias=attention_bias)
    if attention_norm:
        parameters += affine(f"{ours}attention_norm", [prefix + names.attention_norm], hidden, bias=norm_bias)
    parameters += affine(f"{ours}up", [prefix + names.up], up, hidden, bias=mlp_bias)
    parameters += affine(f"{ours}down", [prefix + names.down], hidden, width, bias=mlp_bias)
    return parameters + affine(f"{ours}mlp_norm", [prefix + names.mlp_norm], hidden, bias=norm_bias)


def encoder_spec(
    config: HFConfig,
    family: str,
    encoder: EncoderSpec,
    attention: Sequence[BidirectionalSpec],
    parameters: Sequence[Parameter],
    *,
    max_position: int,
    norm_eps: float,
    ignored: Sequence[str] = (),
) -> ModelSpec:
    """Returns the spec of an encoder. Without a classifier it pools as sentence-transformers does by default."""
    hidden = config.integer("hidden_size")
    width = config.integer("intermediate_size")
    layers = tuple(LayerSpec(each, intermediate_size=width, kv_group=0) for each in attention)
    return ModelSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        layers=layers,
        windows=(Window(),),
        max_position=max_position,
        norm_eps=norm_eps,
        tie_embeddings=False,
        checkpoint_dtype=checkpoint_dtype(config),
        parameters=tuple(parameters),
        ignored_tensors=tuple(ignored),
        encoder=encoder,
        pooling=_pooling(config, hidden, classifies=encoder.classifier is not None),
    )


def head_of(config: HFConfig, base: str) -> tuple[bool, str]:
    """Returns whether the model classifies, and what stands before the encoder's names: `base`, if there is a head."""
    architecture = (config.texts("architectures") or [""])[0]
    return architecture.endswith("ForSequenceClassification"), "" if architecture.endswith("Model") else base


def head_dim(config: HFConfig) -> int:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden % heads:
        raise config.unsupported("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    return hidden // heads


def labels_of(config: HFConfig) -> tuple[str, ...]:
    """The labels of a classifier in order. Without `id2label` there are two, as in transformers."""
    names = config.section("id2label")
    count = config.integer("num_labels", 2, most=MAX_LABELS) if names is None else len(names.names())
    if count > MAX_LABELS:
        raise config.unsupported("id2label", f"of {count} labels", f"at most {MAX_LABELS}")
    if names is None:
        return tuple(f"LABEL_{i}" for i in range(count))
    return tuple(names.text(str(i)) for i in range(count))


def _pooling(config: HFConfig, hidden: int, *, classifies: bool) -> PoolingFacts:
    if not classifies:
        return PoolingFacts(task="embed", mode="mean", width=hidden, encoder=True)
    labels = labels_of(config)
    several = config.get("problem_type") == "multi_label_classification"
    mode = config.one_of("classifier_pooling", "cls", "mean")
    return PoolingFacts(
        task="classify",
        mode="cls" if mode == "cls" else "mean",
        width=len(labels),
        encoder=True,
        labels=labels,
        activation="sigmoid" if several or len(labels) == 1 else "softmax",
    )
