"""Tiny random encoders, written by transformers, and the real MiniLM with its tokenizer."""

from functools import cache
from pathlib import Path
from typing import Any

from penstock.weights.packaged import MINILM

_SIZES: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}
_ROBERTA = {"pad_token_id": 1}
_MODERN = {"local_attention": 16, "pad_token_id": 0}
_BIASES = {"attention_bias": True, "mlp_bias": True, "norm_bias": True}

# variant: the class in transformers, and what differs from _SIZES
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {"hidden_act": "gelu_new", "type_vocab_size": 3}),
    "bert_masked": ("BertForMaskedLM", {}),
    "roberta": ("RobertaModel", _ROBERTA),
    "xlm_roberta": ("XLMRobertaModel", {**_ROBERTA, "type_vocab_size": 1}),
    "modernbert": ("ModernBertModel", _MODERN),
    "modernbert_biases": ("ModernBertModel", {**_MODERN, **_BIASES}),
    "bert_labels": ("BertForSequenceClassification", {"num_labels": 3}),
    "roberta_label": ("RobertaForSequenceClassification", {**_ROBERTA, "num_labels": 1}),
    "xlm_roberta_label": ("XLMRobertaForSequenceClassification", {**_ROBERTA, "num_labels": 1}),
    "modernbert_labels": ("ModernBertForSequenceClassification", {**_MODERN, "num_labels": 2}),
    "modernbert_mean": (
        "ModernBertForSequenceClassification",
        {**_MODERN, "num_labels": 5, "classifier_pooling": "mean", "classifier_bias": True},
    ),
}


def tiny_encoder(variant: str) -> Any:
    """The model in transformers, with weights whose outputs are well spread."""
    import torch
    import transformers

    name, changes = ENCODERS[variant]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**_SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def add_tokenizer(folder: Path) -> None:
    """MiniLM's tokenizer, cut to the vocabulary of a tiny encoder."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,?!"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.add_special_tokens(words[:4])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.save(str(folder / "tokenizer.json"))


def add_roberta_tokenizer(folder: Path) -> None:
    """Letters between the special tokens of RoBERTa, in its order."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrstuvwxyz0123456789.,?! ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(words[:4])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    backend.save(str(folder / "tokenizer.json"))


@cache
def minilm() -> Path:
    """The folder of the real model. Raises HubError when the package is missing or the file is another one."""
    return MINILM.locate()
