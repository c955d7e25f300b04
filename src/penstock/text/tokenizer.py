"""Turns text into token ids and back, as the model's tokenizer files define."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer as Backend

from penstock.gguf import GgufError, is_gguf, read_gguf
from penstock.text.errors import ChatTemplateError, TokenizerError
from penstock.text.files import TokenizerFiles, files_state, read_files, read_json, read_text
from penstock.text.gguf_tokenizer import build_tokenizer, read_templates
from penstock.text.infill import Infill, find_infill
from penstock.text.special_tokens import SpecialTokens, add_special_tokens, read_special_tokens
from penstock.text.template import ChatTemplate
from penstock.text.token_bytes import TokenBytes, read_decoder
from penstock.text.tokenizer_classes import tokenizer_class

CACHED_WORDS = 2000  # whose tokens are remembered

_BEFORE = "\N{WHITE SMILING FACE}"  # no token is longer and begins with it


class TextTokens(NamedTuple):
    """The tokens of a text, or of a pair of texts, for a model that reads them as a whole."""

    ids: tuple[int, ...]
    second: int = 0  # where the tokens of the second text's type begin; 0: all have one type
    content: range = range(0)  # the tokens of the text or, of a pair, of the second text: without special ones

    def cut(self, most: int, most_content: int | None = None) -> "TextTokens":
        """The tokens without the last ones of `content`, so that there are at most `most`, and at most `most_content`
        of `content`. Raises ValueError if the others alone are more."""
        count = len(self.content)
        surplus = max(len(self.ids) - most, 0 if most_content is None else count - most_content, 0)
        if not surplus:
            return self
        if surplus >= count:
            raise ValueError(f"it has {len(self.ids) - count} tokens that cannot be cut off; the limit is {most}")
        end = self.content.stop
        return TextTokens(self.ids[: end - surplus] + self.ids[end:], self.second)


class Tokenizer:
    """Produces the ids of transformers' AutoTokenizer for the same folder, or of llama.cpp for the same GGUF file.

    Threads can share it.

    Other threads run while it encodes or decodes: it uses the backend's batch methods, which release Python's lock.
    """

    path: Path | None  # that it was loaded from
    files_state: str  # of its files before they were read
    vocab_size: int  # the highest id + 1; a model may have more logits
    bos_token_id: int | None
    eos_token_id: int | None
    special_ids: frozenset[int]  # the ids that skip_special_tokens leaves out
    special_texts: Mapping[str, int]  # the texts that become these ids
    chat_template: ChatTemplate | None
    infill: Infill | None  # of a model that fills gaps

    def __init__(self, backend: Backend, special: SpecialTokens, chat_template: ChatTemplate | None) -> None:
        # The library keeps 10,000 words of texts for ever, up to 6 kB each.
        resize = getattr(backend.model, "_resize_cache", None)  # WordPiece has none
        if resize is not None:
            resize(CACHED_WORDS)
        self._backend = backend
        self.path, self.files_state = None, ""
        self.vocab_size = _vocab_size(backend)
        self.bos_token_id = _id(backend, special.text("bos_token"))
        self.eos_token_id = _id(backend, special.text("eos_token"))
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = {token.content: token_id for token_id, token in added.items() if token.special}
        self.chat_template = chat_template
        self.infill = find_infill(lambda token: _id(backend, token), special.text)
        decoder = backend.decoder
        spec = None if decoder is None else msgspec.json.decode(decoder.__getstate__())
        self._spelling = read_decoder(spec)
        self._all_tokens = TokenBytes(backend.id_to_token, self._spelling, frozenset())
        self._tables = {frozenset[int](): self._all_tokens}  # by the ids that they leave out
        self._plain_tokens = self._table(self.special_ids)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Loads a tokenizer and its chat template from a folder, or from the metadata of a GGUF file.

        Raises TokenizerError that names the missing or broken file.
        """
        path = Path(path)
        state = files_state(path)
        loaded = cls._from_gguf(path) if is_gguf(path) else cls._from_folder(path)
        loaded.path, loaded.files_state = path, state
        return loaded

    @classmethod
    def _from_gguf(cls, path: Path) -> "Tokenizer":
        try:
            metadata = read_gguf(path).metadata
        except GgufError as error:  # its message begins with the path
            raise TokenizerError(str(error)) from error
        try:
            backend, special, templates = build_tokenizer(metadata)
        except BaseException as error:  # the library raises bare Exception, and panics
            if not _failed(error):
                raise
            raise TokenizerError(f"{path}: {error}") from error
        return cls(backend, special, _compile_template(path, templates, special))

    @classmethod
    def _from_folder(cls, folder: Path) -> "Tokenizer":
        files = read_files(folder)
        try:
            backend = Backend.from_str(files.tokenizer)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{files.folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        declared = files.config.get("tokenizer_class") or files.model_tokenizer_class
        kind = tokenizer_class(declared, files.model_type, byte_level='"ByteLevel"' in files.tokenizer)
        special = read_special_tokens(files, kind)
        if kind is not None and type(backend.model).__name__ == "BPE":
            kind.build(backend, files.config)
        add_special_tokens(backend, special, kind)
        backend.encode_special_tokens = bool(files.config.get("split_special_tokens", False))
        return cls(backend, special, _load_template(files, special))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text. Raises TokenizerError if the text has an unpaired surrogate, which is not
        valid Unicode."""
        try:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:  # bare Exception, TypeError for surrogates, and panics
            if not _failed(error):
                raise
            raise _refusal(text, error) from error
        ids: list[int] = encoding.ids
        return ids

    def encode_pieces(self, pieces: Sequence[str], *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text that is cut into pieces: no token spans a border. Raises TokenizerError as
        `encode` does."""
        ids = self.encode(pieces[0], add_special_tokens=add_special_tokens)
        if len(pieces) == 1:
            return ids
        before = self.encode(_BEFORE, add_special_tokens=False) if self._adds_space else []
        try:
            later = [_BEFORE + piece if before else piece for piece in pieces[1:]]
            encodings = self._backend.encode_batch_fast(later, add_special_tokens=False)
        except BaseException as error:
            if not _failed(error):
                raise
            raise _refusal("".join(pieces), error) from error
        for piece, encoding in zip(pieces[1:], encodings, strict=True):
            inside = encoding.ids[: len(before)] == before
            ids += encoding.ids[len(before) :] if inside else self.encode(piece, add_special_tokens=False)
        return ids

    @functools.cached_property
    def _adds_space(self) -> bool:
        """True if a space is put before the first word of a text, as SentencePiece does."""
        return self.token_bytes(self.encode(_BEFORE, add_special_tokens=False)[0]).startswith(b" ")

    def encode_infill(self, before: str, after: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns a prompt whose continuation belongs between two texts, for a tokenizer with `infill`. Raises
        TokenizerError as `encode` does."""
        assert self.infill is not None
        ids = self.infill.arrange(self.encode(before, add_special_tokens=False), self._encode_inside(after))
        if not add_special_tokens:
            return ids
        whole, plain = self.encode("x"), self.encode("x", add_special_tokens=False)
        first = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)  # of "x": BOS is before it
        return whole[:first] + ids

    def _encode_inside(self, text: str) -> list[int]:
        """The ids of a text that something comes before: SentencePiece puts a space before the first one."""
        return self.encode_pieces(["", text], add_special_tokens=False) if text else []

    def encode_text(self, text: str, second: str | None = None, *, add_special_tokens: bool = True) -> TextTokens:
        """Returns the tokens of a text, or of a pair. Raises TokenizerError as `encode` does."""
        try:
            (encoding,) = self._backend.encode_batch_fast(
                [text if second is None else (text, second)], add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            if not _failed(error):
                raise
            raise _refusal(text + (second or ""), error) from error
        content = [i for i, number in enumerate(encoding.sequence_ids) if number == (0 if second is None else 1)]
        types = encoding.type_ids
        return TextTokens(
            tuple(encoding.ids),
            types.index(1) if second is not None and 1 in types else 0,
            range(content[0], content[-1] + 1) if content else range(0),
        )

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of a whole sequence. Ids outside the vocabulary add nothing.

        The result is that of transformers, except that `clean_up_tokenization_spaces` has no effect: cleaned-up text is
        not the text that the model produced.
        """
        try:
            texts: list[str] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            if not _failed(error):
                raise
            bad = [i for i in ids if not isinstance(i, int) or not 0 <= i < 2**32]
            reason = f"{bad[0]!r} is not a token id of 0 to {self.vocab_size - 1}" if bad else f"{error}"
            raise TokenizerError(f"these ids cannot be decoded: {reason}") from error
        return texts[0]

    def token(self, token_id: int) -> str:
        """Returns one token as text, also a special one. A token whose bytes are not valid UTF-8 becomes `bytes:` and
        hexadecimal escapes.

        OpenAI's API does the same. Decoded, all such tokens would be U+FFFD.
        """
        piece = self.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that one token adds inside a text. They are empty for an id outside the vocabulary."""
        return self._all_tokens[token_id]

    def token_table(self, *, skip_special_tokens: bool, shown: frozenset[int] = frozenset()) -> TokenBytes:
        """Returns the table of each token's bytes, for detokenisers. `shown` are special tokens that are not skipped.

        Tables are kept, so `shown` must be one of few sets, such as the markers of a model's tool calls.
        """
        if not skip_special_tokens:
            return self._all_tokens
        return self._table(self.special_ids - shown) if shown else self._plain_tokens

    def _table(self, hidden: frozenset[int]) -> TokenBytes:
        if hidden not in self._tables:
            self._tables[hidden] = TokenBytes(self._backend.id_to_token, self._spelling, hidden)
        return self._tables[hidden]


def _id(backend: Backend, token: str | None) -> int | None:
    found: int | None = None if token is None else backend.token_to_id(token)
    return found


def _vocab_size(backend: Backend) -> int:
    count: int = backend.get_vocab_size()
    if all(backend.id_to_token(token_id) is not None for token_id in range(count)):
        return count  # the usual case: much cheaper than a copy of the vocabulary
    return max(backend.get_vocab().values()) + 1


def _failed(error: BaseException) -> bool:
    """True if the tokenizer failed on its input. A panic of the Rust library is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _refusal(text: str, cause: BaseException) -> TokenizerError:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where, point = error.start, ord(text[error.start])
        return TokenizerError(
            f"the text has an unpaired surrogate (U+{point:04X}) at character {where}; send valid Unicode"
        )
    return TokenizerError(f"the tokenizer failed on this text: {cause}")


def _load_template(files: TokenizerFiles, special: SpecialTokens) -> ChatTemplate | None:
    """Loads the template from the first place that has one.

    The places are chat_template.jinja and additional_chat_templates/, tokenizer_config.json, and chat_template.json.
    """
    return _compile_template(*_template_sources(files), special)


def _compile_template(where: Path, sources: Mapping[str, str], special: SpecialTokens) -> ChatTemplate | None:
    if not sources:
        return None
    default = sources.get("default") or sources.get("tool_use")
    if default is None:
        raise TokenizerError(f"{where} has chat templates {', '.join(sources)}, but none is called default or tool_use")
    names = {name: token.content for name, token in special.named.items()}
    try:
        return ChatTemplate(default, names, tool_source=sources.get("tool_use"))
    except ChatTemplateError as error:
        raise TokenizerError(f"{where}: {error}") from error


def chat_template_sources(path: Path) -> dict[str, str]:
    """Returns the chat templates of a model by name, such as "default"; none if it has none. Raises TokenizerError."""
    if not is_gguf(path):
        return _template_sources(read_files(path))[1]
    try:
        return read_templates(read_gguf(path).metadata)
    except GgufError as error:
        raise TokenizerError(str(error)) from error


def _template_sources(files: TokenizerFiles) -> tuple[Path, dict[str, str]]:
    """The file with the templates, and the templates by name."""
    folder = files.folder
    single = folder / "chat_template.jinja"
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if single.is_file() or named:
        sources = {path.stem: read_text(path) for path in named}
        return single, sources | ({"default": read_text(single)} if single.is_file() else {})
    for path, config in (
        (folder / "tokenizer_config.json", files.config),
        (folder / "chat_template.json", read_json(folder / "chat_template.json")),
    ):
        value = config.get("chat_template")
        if value is not None:
            return path, _as_sources(path, value)
    return single, {}


def _as_sources(path: Path, value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    try:
        sources = value if isinstance(value, dict) else {entry["name"]: entry["template"] for entry in value}
        return msgspec.convert(sources, dict[str, str])
    except (TypeError, KeyError, msgspec.ValidationError) as error:
        raise TokenizerError(
            f"chat_template in {path} is neither a string nor a list of {{name, template}}: {error}"
        ) from error
