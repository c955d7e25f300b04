"""Tokenizer classes whose pipeline transformers builds by rule, and not from tokenizer.json.

For most classes tokenizer.json describes the whole pipeline. For a few, transformers (5.x, `AutoTokenizer`) takes only
the vocabulary, merges and post-processor from it and sets the rest itself. Penstock must produce the same ids.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

_FILE = "TokenizersBackend"  # the pipeline in tokenizer.json

# The class that a model type implies. For other types, tokenizer_config.json declares the class.
_CLASS_OF_MODEL: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    "qwen2_moe": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "mistral": _FILE,
    "mistral3": _FILE,
    "mixtral": _FILE,
    "phi3": _FILE,
}
_DECLARES_WRONG_CLASS = frozenset({"qwen2", "phi3"})  # the class that these checkpoints declare is ignored

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerClass(NamedTuple):
    """How transformers builds one class: its pipeline, and its special tokens if the files name none."""

    build: Callable[[Tokenizer, Mapping[str, Any]], None]
    defaults: Mapping[str, str]
    all_special: bool = False  # also marks those special tokens that tokenizer.json has as ordinary tokens


def tokenizer_class(declared: str | None, model_type: str | None, *, byte_level: bool) -> TokenizerClass | None:
    """The class that transformers would use, or None if it would use the pipeline in tokenizer.json.

    `declared` is the `tokenizer_class` of tokenizer_config.json or config.json; `byte_level` says whether
    tokenizer.json has a ByteLevel part.
    """
    implied = _CLASS_OF_MODEL.get(model_type or "")
    declared = declared.removesuffix("Fast") if declared else implied
    if declared == "LlamaTokenizer" and byte_level and implied != _FILE and model_type not in _DECLARES_WRONG_CLASS:
        return None  # Llama 3 and others declare Llama 2's class
    if implied == _FILE or (implied is not None and model_type in _DECLARES_WRONG_CLASS):
        declared = implied
    return _CLASSES.get(declared or "")


def _build_llama(backend: Tokenizer, config: Mapping[str, Any]) -> None:
    prefix_space = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy", False) else "first") if prefix_space else "never"
    _set_model(backend, unk_token=None, fuse_unk=True, byte_fallback=True)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix_space else steps)


def _build_gemma(backend: Tokenizer, config: Mapping[str, Any]) -> None:
    unknown = config.get("unk_token", "<unk>")
    _set_model(backend, unk_token=unknown["content"] if isinstance(unknown, dict) else str(unknown), fuse_unk=True)
    backend.model.byte_fallback = True
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def _build_qwen2(backend: Tokenizer, config: Mapping[str, Any]) -> None:
    _set_model(backend, unk_token=None, fuse_unk=False, byte_fallback=False)
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")), use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()


def _set_model(backend: Tokenizer, **settings: object) -> None:
    model = backend.model
    for name, value in settings.items():
        setattr(model, name, value)
    backend.model = model


_CLASSES: Mapping[str, TokenizerClass] = {
    "LlamaTokenizer": TokenizerClass(_build_llama, {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}),
    "GemmaTokenizer": TokenizerClass(
        _build_gemma,
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "Qwen2Tokenizer": TokenizerClass(
        _build_qwen2,
        {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
        all_special=True,
    ),
}
