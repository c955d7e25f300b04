"""Finds the special tokens by the rules of transformers' `from_pretrained`.

Only the post-processor in tokenizer.json decides whether BOS or EOS is added to a text: transformers 5 ignores
`add_bos_token` and `add_eos_token` of tokenizer_config.json if tokenizer.json exists.
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
    """The special and added tokens of a tokenizer's files."""

    named: dict[str, AddedToken]  # by name: "bos_token" and so on, and the model's own names such as "image_token"
    extra: list[AddedToken]
    added: list[AddedToken]  # every added token that the configuration lists, in the order of ids

    def text(self, name: str) -> str | None:
        """The text of a named token, or None if there is no such token."""
        token = self.named.get(name)
        return None if token is None else token.content


class _AddedTokens(msgspec.Struct):
    """The part of tokenizer.json that lists added tokens. Decoding skips the rest."""

    added_tokens: list[dict[str, Any]] = []


def read_special_tokens(files: TokenizerFiles, kind: TokenizerClass | None) -> SpecialTokens:
    """Reads the tokens from the files. Raises TokenizerError if an entry is malformed."""
    try:
        return _read(files, kind)
    except (TypeError, ValueError, KeyError, AttributeError, msgspec.DecodeError) as error:
        raise TokenizerError(f"the special tokens of {files.folder} are malformed: {error}") from error


def add_special_tokens(backend: Tokenizer, special: SpecialTokens, kind: TokenizerClass | None) -> None:
    """Adds every token of the files to the backend. A token that is not in the vocabulary gets the next free id."""
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
    if kind is not None and kind.all_special:
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
    return _token({**value, "special": True}) if isinstance(value, dict) and "content" in value else value


def _token(value: Any) -> AddedToken:
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return AddedToken(**{key: field for key, field in value.items() if key != "__type"})
