"""Reads and checks the files of a tokenizer in Hugging Face layout."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.gguf.json_file import read_json_object
from penstock.text.errors import TokenizerError

# Tokenizer formats that Penstock cannot read. They are named in the error when tokenizer.json is missing.
_UNCONVERTED = ("tokenizer.model", "vocab.json", "merges.txt", "tekken.json", "tiktoken.model")


class TokenizerFiles(NamedTuple):
    """Holds the contents of a folder's tokenizer files. tokenizer.json must exist; any other missing file counts as
    an empty object."""

    folder: Path
    tokenizer: str  # tokenizer.json, as text
    config: dict[str, Any]  # tokenizer_config.json
    special_tokens_map: dict[str, Any]  # special_tokens_map.json, only in older checkpoints
    added_tokens: dict[str, int]  # added_tokens.json, only in older checkpoints
    model_type: str | None  # from config.json
    model_tokenizer_class: str | None  # from config.json


def read_files(folder: Path) -> TokenizerFiles:
    """Reads the tokenizer files of a folder. Raises TokenizerError, with the file's name, if tokenizer.json is missing
    or a file is broken."""
    if not folder.is_dir():
        raise TokenizerError(f"cannot load a tokenizer: there is no folder {folder}")
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(_missing(folder))
    model = read_json(folder / "config.json")
    return TokenizerFiles(
        folder=folder,
        tokenizer=read_text(folder / "tokenizer.json"),
        config=read_json(folder / "tokenizer_config.json"),
        special_tokens_map=read_json(folder / "special_tokens_map.json"),
        added_tokens=read_json(folder / "added_tokens.json"),
        model_type=_name(model, "model_type"),
        model_tokenizer_class=_name(model, "tokenizer_class"),
    )


def files_state(path: Path) -> str:
    """Returns a text that changes when the files of a tokenizer do: a GGUF file, or those of a folder."""
    files = [path]
    if path.is_dir():
        files = [*path.glob("*.json"), *path.glob("*.jinja"), *(path / "additional_chat_templates").glob("*.jinja")]
    states = sorted((file.name, file.stat()) for file in files if file.is_file())
    return " ".join(f"{name}:{state.st_mtime_ns}:{state.st_size}" for name, state in states)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, or an empty dict if the file does not exist. Raises TokenizerError if the file
    cannot be read or holds anything else."""
    if not path.is_file():
        return {}
    try:
        return read_json_object(path, unique=False)
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    except ValueError as error:  # its message begins with the path
        raise TokenizerError(str(error)) from error


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises TokenizerError if the file cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _name(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    return value if isinstance(value, str) else None


def _missing(folder: Path) -> str:
    found = [name for name in _UNCONVERTED if (folder / name).is_file()]
    if not found:
        return f"{folder} has no tokenizer.json. Download it from the model's repository, or name a folder that has it"
    return (
        f"{folder} has {' and '.join(found)} but no tokenizer.json, the only format Penstock reads. "
        "Convert it once in Python: from transformers import AutoTokenizer; "
        f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    )
