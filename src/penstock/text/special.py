"""Which tokens are special, by the rules of transformers' `from_pretrained`.

Whether a BOS or EOS is put around a text is up to the post-processor in tokenizer.json alone: where that file exists,
transformers 5 disregards `add_bos_token` and `add_eos_token` of tokenizer_config.json.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from penstock.text.errors import TokenizerError
from penstock.text.files import TokenizerFiles
from penstock.text.pipeline import TokenizerClass

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class SpecialTokens(NamedTuple):
    named: dict[str, AddedToken]  # "bos_token", ... and names of the model's own, such as "image_token"
    extra: list[AddedToken]
    added: list[AddedToken]  # every added token the configuration lists, by id

    def text(self, name: str) -> str | None:
        token = self.named.get(name)
        return None if token is None else token.content


class _Listed(msgspec.Struct):
    """The part of tokenizer.json that lists added tokens; the vocabulary is skipped."""

    added_tokens: list[dict[str, Any]] = []


def read_special_tokens(files: TokenizerFiles, kind: TokenizerClass | None) -> SpecialTokens:
    """What the files say. Raises TokenizerError for entries of the wrong shape."""
    try:
        return _read(files, kind)
    except (TypeError, ValueError, KeyError, AttributeError, msgspec.DecodeError) as error:
        raise TokenizerError(f"the special tokens of {files.folder} are malformed: {error}") from error


def add_special_tokens(backend: Tokenizer, special: SpecialTokens, kind: TokenizerClass | None) -> None:
    """Makes the backend know every token the files list. One that is not in the vocabulary gets the next free id."""
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
    else:  # older checkpoints, whose special tokens may be in files of their own
        settings |= {name: _marked(value) for name, value in files.special_tokens_map.items()}
        specials = {token.content for token in _named(settings).values()} | {t.content for t in _extra(settings)}
        for text, index in files.added_tokens.items():
            special = text in specials
            added[int(index)] = AddedToken(text, normalized=not special, special=special)
        for fields in msgspec.json.decode(files.tokenizer, type=_Listed).added_tokens:
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
