"""BERT, RoBERTa and XLM-RoBERTa: norms after attention and MLP, learned positions."""

from penstock.families.encoders.shared import (
    BidirectionalSpec,
    LayerNames,
    activation,
    affine,
    encoder_layer,
    encoder_spec,
    head_dim,
    head_of,
    labels_of,
)
from penstock.families.hf_config import HFConfig
from penstock.families.llama_like import num_layers
from penstock.families.spec import EncoderSpec, ModelSpec, stacked

_NAMES = LayerNames(
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)


def bert(config: HFConfig) -> ModelSpec:
    return _spec(config, "bert", "bert.", "bert.pooler.dense", "classifier")


def roberta(config: HFConfig) -> ModelSpec:
    """RoBERTa and XLM-RoBERTa: positions are counted from the padding token's id + 1."""
    return _spec(config, "roberta", "roberta.", "classifier.dense", "classifier.out_proj")


def _spec(config: HFConfig, family: str, base: str, dense: str, out: str) -> ModelSpec:
    """`base` stands before the names of a model with a head, `dense` and `out` are its classifier's matrices."""
    config.one_of("position_embedding_type", "absolute")
    config.refuse("is_decoder", "a decoder has a mask that is not implemented")
    classifies, prefix = head_of(config, base)
    hidden, positions = config.integer("hidden_size"), config.integer("max_position_embeddings")
    first = 0 if family == "bert" else config.integer("pad_token_id", 1, least=0) + 1
    if first >= positions:
        raise config.unsupported("max_position_embeddings", positions, f"more than {first}")
    tables = {
        "tokens": ("word_embeddings", config.integer("vocab_size")),
        "positions": ("position_embeddings", positions),
        "types": ("token_type_embeddings", types := config.integer("type_vocab_size", 2)),
    }
    parameters = [
        stacked(f"{ours}.weight", (hidden,), (f"{prefix}embeddings.{theirs}.weight", rows))
        for ours, (theirs, rows) in tables.items()
    ]
    parameters += affine("embedding_norm", [f"{prefix}embeddings.LayerNorm"], hidden)
    layers = num_layers(config)
    for i in range(layers):
        parameters += encoder_layer(config, i, f"{prefix}encoder.layer.{i}.", _NAMES)
    if classifies:
        parameters += affine("classifier.dense", [dense], hidden, hidden)
        parameters += affine("classifier.out", [out], len(labels_of(config)), hidden)
    # BERT's classifier uses the pooler; RoBERTa's does not, and has none.
    unused = () if classifies else (f"{prefix}pooler.*", "cls.*", "lm_head.*")
    return encoder_spec(
        config,
        family,
        EncoderSpec(
            activation(config, "hidden_act", "gelu"),
            first_position=first,
            segments=types > 1 and family == "bert",
            classifier="tanh" if classifies else None,
        ),
        [BidirectionalSpec(config.integer("num_attention_heads"), head_dim(config))] * layers,
        parameters,
        max_position=positions - first,
        norm_eps=config.number("layer_norm_eps", 1e-12),
        ignored=(f"{prefix}embeddings.position_ids", *unused),
    )
