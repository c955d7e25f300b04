"""Reads the special tokens of a checkpoint by the rules of transformers' `from_pretrained`, so that ids are the same.

This module does not read `add_bos_token` and `add_eos_token` of tokenizer_config.json. The post-processor in
tokenizer.json decides whether a text gets BOS or EOS: transformers 5 ignores the two settings if that file exists.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from penstock.text.errors import TokenizerError
from penstock.text.files import TokenizerFiles
from penstock.text.tokenizer_classes import TokenizerClass

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class SpecialTokens(NamedTuple):
    """Holds the special and added tokens that a tokenizer's files declare."""

    named: dict[str, AddedToken]  # by name: "bos_token" and so on, and the model's own names such as "image_token"
    extra: list[AddedToken]  # special tokens without a name, from `extra_` or `additional_special_tokens`
    # All tokens that the files list with an id, in the order of ids. They come from `added_tokens_decoder` in
    # tokenizer_config.json. Older checkpoints do not have it: they list them in added_tokens.json and tokenizer.json.
    added: list[AddedToken]

    def text(self, name: str) -> str | None:
        """Returns the text of a named token, or None if there is no such token."""
        token = self.named.get(name)
        return None if token is None else token.content


class _AddedTokens(msgspec.Struct):
    """Declares the one field of tokenizer.json that is read here. msgspec ignores all other fields."""

    added_tokens: list[dict[str, Any]] = []


def read_special_tokens(files: TokenizerFiles, kind: TokenizerClass | None) -> SpecialTokens:
    """Reads the tokens from the files. Raises TokenizerError if an entry is malformed."""
    try:
        return _read(files, kind)
    except (TypeError, ValueError, KeyError, AttributeError, msgspec.DecodeError) as error:
        raise TokenizerError(
            f"the special tokens of {files.folder} are malformed ({type(error).__name__}: {error}); check "
            "tokenizer_config.json and, in an older checkpoint, tokenizer.json, special_tokens_map.json and "
            "added_tokens.json"
        ) from error


def add_special_tokens(backend: Tokenizer, special: SpecialTokens, kind: TokenizerClass | None) -> None:
    """Adds every token of the files to the backend. A token that is not in the vocabulary gets the next free id.

    A token that is added here becomes special if it is a named one, such as "bos_token". A token that the backend
    already lists as added keeps its flags, unless `special.added` lists it too.
    """
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {token.content for token in special.added}
    tokens = list(special.added)
    for token in [*special.named.values(), *special.extra]:
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    names = {token.content for token in special.named.values()}
    for token in tokens:
        token.special = token.special or token.content in names
    backend.add_tokens(tokens)
    if kind is not None and kind.all_special:  # added again, because this also changes the flags of existing tokens
        every = dict.fromkeys(token.content for token in [*special.named.values(), *special.extra])
        backend.add_tokens([AddedToken(text, special=True) for text in every])


def _read(files: TokenizerFiles, kind: TokenizerClass | None) -> SpecialTokens:
    settings: dict[str, Any] = {**(kind.defaults if kind else {}), **files.config}
    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in files.config:
        for index, fields in files.config["added_tokens_decoder"].items():
            added[int(index)] = _token(fields)
    else:  # an older checkpoint, whose special tokens may be in separate files
        settings |= {name: _marked(value) for name, value in files.special_tokens_map.items()}
        specials = {token.content for token in _named(settings).values()} | {t.content for t in _extra(settings)}
        for text, index in files.added_tokens.items():
            special = text in specials
            added[int(index)] = AddedToken(text, normalized=not special, special=special)
        for fields in msgspec.json.decode(files.tokenizer, type=_AddedTokens).added_tokens:
            added[int(fields["id"])] = _token({key: value for key, value in fields.items() if key != "id"})
    by_text = {token.content: token for token in added.values()}
    named = {name: by_text.get(token.content, token) for name, token in _named(settings).items()}
    return SpecialTokens(named, _extra(settings), [added[index] for index in sorted(added)])


def _named(settings: Mapping[str, Any]) -> dict[str, AddedToken]:
    own = [name for name, value in settings.items() if name.endswith("_token") and isinstance(value, str | AddedToken)]
    named = {name: settings[name] for name in dict.fromkeys([*_NAMED, *own]) if settings.get(name) is not None}
    extra = _extra_setting(settings)
    if isinstance(extra, dict):
        named |= extra
    return {name: _token(value) for name, value in named.items()}


def _extra(settings: Mapping[str, Any]) -> list[AddedToken]:
    extra = _extra_setting(settings)
    return [] if extra is None or isinstance(extra, dict) else [_token(value) for value in extra]


def _extra_setting(settings: Mapping[str, Any]) -> Any:
    return settings.get("extra_special_tokens") or settings.get("additional_special_tokens")


def _marked(value: Any) -> Any:
    """Returns a token object of special_tokens_map.json as a special token, and any other value unchanged."""
    return _token({**value, "special": True}) if isinstance(value, dict) and "content" in value else value


def _token(value: Any) -> AddedToken:
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{key: field for key, field in value.items() if key != "__type"})
