"""Chooses the GGUF files of one model among the files of a folder or of a repository on a hub."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from penstock.gguf import part_name

_READ = (".json", ".safetensors", ".gguf", ".jinja")  # suffixes of the files that are read
_SPECIAL = (
    (Path.is_fifo, "FIFO"),
    (Path.is_socket, "socket"),
    (Path.is_char_device, "character device"),
    (Path.is_block_device, "block device"),
)
_SHOWN = 12  # names in an error
_OTHER_KINDS = ("mmproj", "imatrix")  # files that hold no language model, by the beginning of their name


class HubError(ValueError):
    """The model's files are not available; the message says why and what to do."""


class HubFailure(HubError):
    """The hub, the network or the disk failed: the same call may succeed later."""


def gguf_models(files: Sequence[str]) -> dict[str, list[str]]:
    """The models among files, by the name of their first file, each with all of its files. An incomplete set of parts
    is not a model."""
    present = {name for name in files if _may_be_model(name)}
    models: dict[str, list[str]] = {}
    for name in sorted(present):
        path = PurePosixPath(name)
        part = part_name(path.name)
        if part is None:
            models[name] = [name]
        elif part.number == 1:
            parts = [str(path.with_name(part.sibling(number))) for number in range(1, part.count + 1)]
            if present.issuperset(parts):
                models[name] = parts
    return models


def choose_gguf(where: str, files: Sequence[str], tag: str | None) -> list[str]:
    """The files of the one model whose name has the quantisation `tag`, which may also be the whole name of a file; of
    the only model without a tag. Raises HubError, which lists the models, if there are several or none."""
    models = gguf_models(files)
    if not models:
        raise HubError(f"{where} has no model in GGUF: no complete file NAME.gguf is there")
    found = list(models)
    if tag is not None:
        found = [name for name in models if tag in models[name]] or [name for name in models if _has(name, tag)]
    if len(found) == 1:
        return models[found[0]]
    if tag is None:
        raise HubError(f"{where} has {len(found)} models in GGUF; name one of: {_listed(found)}")
    if not found:
        raise HubError(f"{where} has no model in GGUF named {tag}; there are: {_listed(list(models))}")
    raise HubError(f"{where} has {len(found)} models in GGUF named {tag}; name the file, one of: {_listed(found)}")


def holds_gguf(files: Sequence[str]) -> bool:
    """Whether files are those of a model in GGUF: some are GGUF, and no model in safetensors is beside them."""
    safetensors = "config.json" in files and any(name.endswith(".safetensors") for name in files)
    return not safetensors and any(map(_may_be_model, files))


def model_in_folder(folder: Path) -> Path:
    """The GGUF file of the one model in a folder that holds no other format, the first of several parts; else the
    folder itself.

    Raises HubError if there are several models, or if a FIFO, a socket or a device has the name of a model's file: to
    read one could take forever.
    """
    _refuse_special(folder)
    files = [path.name for path in folder.glob("*") if path.is_file()]
    return folder / choose_gguf(str(folder), files, None)[0] if holds_gguf(files) else folder


def _refuse_special(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix in _READ and path.exists() and not (path.is_file() or path.is_dir()):
            kind = next((name for test, name in _SPECIAL if test(path)), "special file")
            raise HubError(f"{path} is a {kind}; a model's files must be regular files: remove it, or copy the data")


def _has(name: str, tag: str) -> bool:
    """Whether a name has a quantisation: Q4_K is not part of Q4_K_M, nor Q4_0 of IQ4_0."""
    return re.search(f"(?<![a-z0-9]){re.escape(tag.lower())}(?![a-z0-9_])", name.lower()) is not None


def _may_be_model(name: str) -> bool:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        return False
    return path.suffix.lower() == ".gguf" and not path.name.lower().startswith(_OTHER_KINDS)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
