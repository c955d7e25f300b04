"""Small tokenizers of the kinds that language models have, built here and written as they are found on the hub."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "def greet(name):\n    return f'Hello, {name}!'\n",
    "The quick brown fox jumps over the lazy dog. It's 12:34 o'clock; isn't it?\n\n",
    "Größe, naïve café, 你好，世界！ こんにちは 🙂👍🏽 Привет мир\t\tтабуляция\n",
    "for i in range(100):\n\tprint(i * 2, end=' ')\n",
) * 8
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_PATTERN = _LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def qwen(folder: Path) -> None:
    """Byte-level BPE without BOS; special tokens after the vocabulary, one added token that is not special."""
    backend = _byte_level(_QWEN2_PATTERN)
    backend.normalizer = normalizers.NFC()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(added)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), "<tool call>"])
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": _decoder_of(backend),
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": 4096,
    }
    write(folder, backend, config, "qwen3")


def llama3(folder: Path) -> None:
    """Byte-level BPE whose post-processor adds BOS, under the class name of Llama 2."""
    backend = _byte_level(_LLAMA3_PATTERN)
    backend.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved|>"])
    bos = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B",
                special_tokens=[("<|begin_of_text|>", bos)],
            ),
        ]
    )
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "added_tokens_decoder": _decoder_of(backend),
        "clean_up_tokenization_spaces": True,
    }
    write(folder, backend, config, "llama")


def llama2(folder: Path, **changes: Any) -> None:
    """SentencePiece-like BPE with byte fallback; the normalizer adds the prefix space, as in Llama 2's own file."""
    backend = _sentencepiece_bpe(["<unk>", "<s>", "</s>"], unk="<unk>")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    token = {"__type": "AddedToken", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {**token, "content": "<s>"},
        "eos_token": {**token, "content": "</s>"},
        "unk_token": {**token, "content": "<unk>"},
        "legacy": False,
        "pad_token": None,
        "clean_up_tokenization_spaces": False,
    } | changes
    special_map = {
        name: {**token, "content": text}
        for name, text in {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}.items()
    }
    for entry in special_map.values():
        del entry["__type"]
    write(folder, backend, config, "llama", special_tokens_map=special_map)


def mistral(folder: Path) -> None:
    """The same kind under the same class name, but for a model whose tokenizer.json is taken as it is."""
    llama2(folder, legacy=True, add_eos_token=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral"}))


def gemma(folder: Path) -> None:
    """BPE with byte fallback and no prefix space."""
    backend = _sentencepiece_bpe(["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], unk="<unk>")
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens(["<start_of_turn>", "<end_of_turn>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 2)]
    )
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "boi_token": "<start_of_image>",
        "extra_special_tokens": {"image_token": "<image_soft_token>"},
        "added_tokens_decoder": _decoder_of(backend),
    }
    write(folder, backend, config, "gemma3_text")


def unigram(folder: Path) -> None:
    """A Unigram model with Metaspace, as tokenizer.json alone describes it."""
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.Metaspace()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    write(folder, backend, config, "llama")


def words(folder: Path) -> None:
    """Whole words without any decoder: tokens are joined by spaces."""
    vocabulary = {"<unk>": 0, "</s>": 1, "hello": 2, "world": 3, "again": 4}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["</s>"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "<unk>"}
    write(folder, backend, config, "llama")


KINDS: Mapping[str, Callable[[Path], None]] = {
    "qwen": qwen,
    "llama3": llama3,
    "llama2": llama2,
    "mistral": mistral,
    "gemma": gemma,
    "unigram": unigram,
    "words": words,
}


def write(
    folder: Path,
    backend: Tokenizer,
    config: Mapping[str, Any],
    model_type: str,
    special_tokens_map: Mapping[str, Any] | None = None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if special_tokens_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))


def _byte_level(pattern: str) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _sentencepiece_bpe(first: list[str], unk: str) -> Tokenizer:
    """Special tokens, 256 byte tokens, then pieces learned from the corpus."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    learner.train_from_iterator(CORPUS[:2], trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    vocabulary = {token: index for index, token in enumerate([*first, *_BYTES, *pieces, "▁▁", "▁▁▁▁"])}
    merges = [*map(tuple, learned["merges"]), ("▁", "▁"), ("▁▁", "▁▁")]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=unk, fuse_unk=True, byte_fallback=True))
    backend.add_special_tokens(first)
    return backend


def _decoder_of(backend: Tokenizer) -> dict[str, Any]:
    fields = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {
        str(index): {name: getattr(token, name) for name in fields}
        for index, token in backend.get_added_tokens_decoder().items()
    }
