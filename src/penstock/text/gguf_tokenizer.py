"""Builds a tokenizer from the metadata of a GGUF file. It gives llama.cpp's ids, with special tokens parsed.

A file has either byte-level BPE with merges (`gpt2`), BPE over characters with merges (`gemma4`), or SentencePiece's
BPE, where a token has a score in place of merges (`llama`, Gemma 3's too).
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.gguf.header import short
from penstock.gguf.vocabulary import TokenKind, Vocabulary, read_vocabulary
from penstock.text.errors import TokenizerError
from penstock.text.gguf_pretokenizers import PRE_TOKENIZERS
from penstock.text.special_tokens import SpecialTokens

_log = logging.getLogger(__name__)
_SPACE = "▁"  # in the tokens of SentencePiece
# Limits of untrusted files, far above those of models: work grows with their product.
_MAX_PIECE = 512  # characters of a token with a score
_MAX_PIECES = 16 << 20  # characters of all tokens with a score
_MAX_RESPELLED = 256  # tokens
_PRIVATE_USE = range(0xE000, 0xF900)  # characters without a meaning
_MATCHED: Final = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
_NAMED: Final = ("bos", "eos", "unk", "sep", "pad", "mask", "fim_pre", "fim_suf", "fim_mid")
# Phi-3 drops white space after special tokens. Files do not say so: llama.cpp goes by the model's name.
_STRIPPING_MODELS: Final = ("phi-3", "phi3")
_NOT_STRIPPING: Final = ("<unk>", "<s>", "<|endoftext|>")


class GgufTokenizer(NamedTuple):
    """The parts of a `Tokenizer`."""

    backend: Tokenizer
    special: SpecialTokens
    templates: dict[str, str]  # chat templates by name, "default" the unnamed one


def build_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """Builds the tokenizer. Raises TokenizerError or GgufError, without the file's name, if the metadata is broken or
    of a kind that is not supported."""
    model = metadata.get("tokenizer.ggml.model")
    build = _MODELS.get(model) if isinstance(model, str) else None
    if build is None:
        raise TokenizerError(
            f"tokenizer.ggml.model is {short(model)}, which is not supported. Supported are {', '.join(_MODELS)}: "
            "use another model"
        )
    vocabulary, mark = _with_unique_tokens(read_vocabulary(metadata))
    backend, adds_bos = build(metadata, vocabulary)
    if mark:
        backend.decoder = decoders.Sequence([decoders.Replace(mark, ""), backend.decoder])
    backend.add_tokens(list(_added_tokens(metadata, vocabulary)))
    _set_post_processor(backend, metadata, vocabulary, adds_bos)
    named = {f"{name}_token": vocabulary.tokens[vocabulary.ids[name]] for name in _NAMED if name in vocabulary.ids}
    special = SpecialTokens({name: AddedToken(text, special=True) for name, text in named.items()}, [], [])
    return GgufTokenizer(backend, special, read_templates(metadata))


def _with_unique_tokens(vocabulary: Vocabulary) -> tuple[Vocabulary, str]:
    """Returns the vocabulary with marks at the ends of tokens that come again, and the mark; "" if there are none.

    As in llama.cpp, a text becomes the last of equal tokens, and all of them become the text.
    """
    last = _index(vocabulary)
    if len(last) == len(vocabulary.tokens):
        return vocabulary, ""
    chars = set().union(*vocabulary.tokens)
    mark = next((char for char in map(chr, _PRIVATE_USE) if char not in chars), "")
    if not mark:
        raise TokenizerError("tokens are equal, and others have all characters for private use. Use another conversion")
    tokens, seen = [], Counter[str]()
    for token_id, token in enumerate(vocabulary.tokens):
        again = last[token] != token_id
        seen[token] += again
        tokens.append(token + mark * seen[token] if again else token)
    count = len(tokens) - len(last)
    _log.warning("%d tokens of the file are equal to later ones, to which texts are encoded, as in llama.cpp", count)
    return vocabulary._replace(tokens=tokens), mark


def _byte_level(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        _log.warning("the file has no tokenizer.ggml.pre: using 'default', as llama.cpp does. Answers may be worse")
        name = "default"
    kind = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {short(name)}, which is not supported. Supported are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )
    index = _index(vocabulary)
    backend = Tokenizer(_bpe(index, _merges(metadata, index), ignore_merges=kind.whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    missing = "".join(sorted(char for char in pre_tokenizers.ByteLevel.alphabet() if char not in index))
    if missing:  # a byte without a token is left out, and the tokens on both sides of it are not merged
        steps.append(pre_tokenizers.Split(Regex(f"[{re.escape(missing)}]"), "removed"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.Sequence([*_respellings(vocabulary), decoders.ByteLevel()])
    return backend, kind.adds_bos


def _respellings(vocabulary: Vocabulary) -> list[decoders.Decoder]:
    """Decoder steps for tokens that are matched as they are, but look like byte-level spelling: "ü" is no byte 0xFC.

    A step replaces a text in any token, so a text that is part of another token gets none.
    """
    alphabet, spell = set(pre_tokenizers.ByteLevel.alphabet()), pre_tokenizers.ByteLevel(False, use_regex=False)
    spelled = {
        token: spell.pre_tokenize_str(token)[0][0]
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=False)
        if kind in _MATCHED and not token.isascii() and alphabet.issuperset(token)
    }
    if not 0 < len(spelled) <= _MAX_RESPELLED:
        return []
    every = "\0".join([*vocabulary.tokens, *spelled.values()])
    return [decoders.Replace(token, text) for token, text in spelled.items() if every.count(token) == 1]


def _gemma4(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    index = _index(vocabulary)
    backend = Tokenizer(_character_bpe(vocabulary, index, _merges(metadata, index)))
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    backend.decoder = _sentencepiece_decoder(strips=False)
    return backend, True


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    index = _index(vocabulary)
    backend = Tokenizer(_character_bpe(vocabulary, index, _merges_by_score(vocabulary, index)))
    prefix = _flag(metadata, "add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    backend.decoder = _sentencepiece_decoder(strips=prefix)
    return backend, True


_MODELS: Final[Mapping[str, Callable[[Mapping[str, Any], Vocabulary], tuple[Tokenizer, bool]]]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _gemma4,
}


def _index(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(vocabulary.tokens)}


def _character_bpe(vocabulary: Vocabulary, index: dict[str, int], merges: list[tuple[str, str]]) -> models.BPE:
    unknown = vocabulary.tokens[vocabulary.ids["unk"]] if "unk" in vocabulary.ids else None
    return _bpe(index, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def _bpe(index: dict[str, int], merges: list[tuple[str, str]], **settings: Any) -> models.BPE:
    try:
        return models.BPE(index, merges, **settings)
    except Exception as error:  # a merge of a string that is no token
        raise TokenizerError(f"tokenizer.ggml.merges: {error}. Use another conversion") from error


def _sentencepiece_decoder(*, strips: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if strips else steps)


def _merges(metadata: Mapping[str, Any], index: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges in order. A pair that is listed twice has its first place.

    A file with equal tokens may have merges of tokens that one of these has taken the place of: they are left out.
    """
    lines = metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list) or not set(map(type, lines)) <= {str}:
        raise TokenizerError(
            f"tokenizer.ggml.merges is {short(lines)}; expected an array of strings. Use another conversion"
        )
    merges, lost = [], 0
    tokens = metadata["tokenizer.ggml.tokens"]
    has_equal = len(set(tokens)) < len(tokens)
    for line in dict.fromkeys(lines):
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        if has_equal and at >= 0 and not (left in index and right in index and left + right in index):
            lost += 1
            continue
        if at < 0 or left + right not in index:  # the library panics where the sum is longer than all tokens
            raise TokenizerError(
                f"tokenizer.ggml.merges has {short(line)}, but a merge is two tokens that make a third. "
                "Use another conversion"
            )
        merges.append((left, right))
    if lost:
        _log.warning("%d merges of the file are of tokens that it does not have; they are left out", lost)
    return merges


def _merges_by_score(vocabulary: Vocabulary, index: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every pair of tokens that make a third, highest score of the third first.

    SentencePiece takes the leftmost of two pairs with equal scores. The library has no equal ranks. A longer left part
    goes first: then a run of one character grows from its left end, as it does there.
    """
    if vocabulary.scores is None:
        raise TokenizerError("tokenizer.ggml.scores is missing, but a tokenizer of type llama needs it")
    if sum(map(len, vocabulary.tokens)) > _MAX_PIECES:
        raise TokenizerError(f"the tokens have more than {_MAX_PIECES} characters in all. Use another conversion")
    ranked = []
    for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=False):
        if len(token) > _MAX_PIECE:
            raise TokenizerError(f"token {short(token)} has {len(token)} characters; {_MAX_PIECE} are allowed")
        for at in range(len(token) - 1, 0, -1):
            left, right = token[:at], token[at:]
            if left in index and right in index:
                ranked.append((-score, -at, left, right))
    ranked.sort(key=lambda entry: entry[:2])
    return [(left, right) for _, _, left, right in ranked]


def _added_tokens(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> Iterator[AddedToken]:
    """The tokens that are matched in a text as they are. Control tokens are special, user-defined ones are not."""
    name = metadata.get("general.name")
    strips = isinstance(name, str) and any(part in name.lower() for part in _STRIPPING_MODELS)
    for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=False):
        if kind in _MATCHED:
            yield AddedToken(
                token,
                special=kind != TokenKind.USER_DEFINED,
                normalized=False,
                rstrip=strips and token not in _NOT_STRIPPING,
            )


def _set_post_processor(
    backend: Tokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary, adds_bos: bool
) -> None:
    """Lets the backend add BOS and EOS where the file says so."""
    ends = {
        name: vocabulary.tokens[vocabulary.ids[name]]
        for name, default in (("bos", adds_bos), ("eos", False))
        if _flag(metadata, f"add_{name}_token", default) and name in vocabulary.ids
    }
    if ends:
        single, pair = ([ends.get("bos"), *texts, ends.get("eos")] for texts in (["$A"], ["$A", "$B"]))
        backend.post_processor = processors.TemplateProcessing(
            single=[part for part in single if part is not None],
            pair=[part for part in pair if part is not None],
            special_tokens=[(token, vocabulary.ids[name]) for name, token in ends.items()],
        )


def read_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name."""
    key = "tokenizer.chat_template"
    found = {}
    for name, value in metadata.items():
        if name == key or name.startswith(f"{key}."):
            if not isinstance(value, str):
                raise TokenizerError(f"{name} is {short(value)}; expected a string. Use another conversion")
            found[name.removeprefix(key).removeprefix(".") or "default"] = value
    return found


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, bool) else default
