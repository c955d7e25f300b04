"""The models in Hugging Face's cache, from the names of its files alone. Nothing is imported that takes long.

The layout is public (huggingface_hub's guide "Understand caching"):

    models--ORG--NAME/refs/main                   the commit of a branch or tag
    models--ORG--NAME/snapshots/COMMIT/FILE       links to blobs
    models--ORG--NAME/blobs/DIGEST, DIGEST.incomplete
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path, PurePosixPath

from penstock.gguf import part_name
from penstock.weights.gguf_choice import gguf_models, holds_gguf

MAX_REPOSITORIES = 2000
MAX_FILES = 5000  # of a repository
MAX_DEPTH = 4  # folders below a snapshot
_PREFIX = "models--"
_FOLDER = re.compile(r"models--[A-Za-z0-9._-]{1,96}--[A-Za-z0-9._-]{1,96}", re.ASCII)
CACHE = "Hugging Face cache"
INCOMPLETE = "incomplete"
NO_WEIGHTS = "no weights"
_QUANTISATION = re.compile(r"(.*)[-._]((?:i?q\d|f16|f32|bf16|mxfp4)\w*)", re.IGNORECASE)
_SHARD = re.compile(r"model-\d+-of-(?P<count>\d{1,6})\.safetensors")


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine. `problem` says why it cannot be used; it is empty for a model that can."""

    name: str  # as commands take it: org/name, or org/name:Q4_K_M for a GGUF file
    where: str
    path: Path | None  # its folder or GGUF file, if it is complete
    size: int  # bytes on disk
    modified: float  # seconds since 1970
    problem: str = ""
    repository: Path | None = None  # its folder in the cache
    revision: str = ""  # commit; empty if the model is not in the cache, or only a part of a download is
    refs: tuple[str, ...] = ()  # branches and tags that mean this revision here
    files: tuple[Path, ...] = ()  # in the cache, of this revision


def cache_folder() -> Path:
    """Returns Hugging Face's cache, which HF_HUB_CACHE and HF_HOME set."""
    from huggingface_hub.constants import HF_HUB_CACHE  # does not import the rest of huggingface_hub

    return Path(os.path.expanduser(HF_HUB_CACHE)).resolve()  # Path.expanduser fails without a home


def cached_models(cache: Path | None = None) -> list[LocalModel]:
    """Returns the models in the cache, by name. A folder that cannot be read is left out."""
    return sorted(_scan(cache or cache_folder()), key=lambda model: (model.name.lower(), "main" not in model.refs))


def _scan(cache: Path) -> Iterator[LocalModel]:
    folders = (folder for folder in _folders(cache) if _FOLDER.fullmatch(folder.name))
    for folder in islice(folders, MAX_REPOSITORIES):
        yield from _repository(folder)


def _repository(folder: Path) -> Iterator[LocalModel]:
    name = folder.name.removeprefix(_PREFIX).replace("--", "/")
    refs = _refs(folder / "refs")
    found: list[LocalModel] = []
    linked: set[str] = set()
    for snapshot in _folders(folder / "snapshots"):
        files = {file.relative_to(snapshot).as_posix(): file for file in islice(_files(snapshot), MAX_FILES)}
        linked.update(os.path.realpath(file) for file in files.values())
        found += _snapshot(name, folder, snapshot, files, refs.get(snapshot.name, ()))
    # Blobs that belong to no snapshot are parts of a download that has not ended.
    blobs = [blob for blob in islice(_files(folder / "blobs", 0), MAX_FILES) if os.path.realpath(blob) not in linked]
    left = [status for blob in blobs if (status := _stat(blob)) is not None]
    if left:
        size, modified = sum(status.st_size for status in left), max(status.st_mtime for status in left)
        of_model = next((model for model in found if model.problem), None)
        if of_model is None:
            found.append(LocalModel(name, CACHE, None, size, modified, INCOMPLETE, folder))
        else:
            whole = replace(of_model, size=of_model.size + size, modified=modified, problem=INCOMPLETE)
            found[found.index(of_model)] = whole
    yield from found


def _snapshot(
    name: str, folder: Path, snapshot: Path, files: Mapping[str, Path], refs: tuple[str, ...]
) -> Iterator[LocalModel]:
    """The models of one revision: one for each GGUF model, or one in safetensors."""
    status = {file: found for file, path in files.items() if (found := _stat(path)) is not None}  # not of broken links

    def model(name: str, path: Path, parts: list[str], problem: str = "") -> LocalModel:
        size, modified = sum(status[part].st_size for part in parts), max(status[part].st_mtime for part in parts)
        paths = tuple(snapshot / part for part in parts)
        where = None if problem else path
        return LocalModel(name, CACHE, where, size, modified, problem, folder, snapshot.name, refs, paths)

    if holds_gguf(list(status)):
        models = gguf_models(list(status))
        for first, parts in models.items():
            yield model(f"{name}:{_tag(name, first, list(models))}", snapshot / first, parts)
    elif "config.json" in status:
        yield model(name, snapshot, list(status), _problem(list(files), list(status)))


def _problem(files: list[str], present: list[str]) -> str:
    weights = [file for file in present if "/" not in file and fnmatchcase(file, "model*.safetensors")]
    shards = [part for file in weights if (part := _SHARD.fullmatch(file))]
    if not weights:
        return NO_WEIGHTS
    lost = len(present) < len(files) or any(len(shards) != int(shard["count"]) for shard in shards)
    return INCOMPLETE if lost else ""


def _tag(name: str, file: str, files: list[str]) -> str:
    """Returns the part of the name after the colon: the quantisation, if the file is named as its repository and is the
    only one with it; else the file's name."""
    path = PurePosixPath(file)
    part = part_name(path.name)
    match = _QUANTISATION.fullmatch(part.stem if part else path.stem)
    if match is None or match[1].lower() != name.rpartition("/")[2].lower().removesuffix("-gguf"):
        return file
    return match[2] if sum(match[2].lower() in other.lower() for other in files) == 1 else file


def _refs(folder: Path) -> dict[str, tuple[str, ...]]:
    """Branches and tags, by commit."""
    found: dict[str, tuple[str, ...]] = {}
    for path in islice(_files(folder), MAX_FILES):
        if not path.is_file():  # a pipe would block
            continue
        try:
            with path.open() as file:
                commit = file.read(100).strip()
        except (OSError, UnicodeDecodeError):
            continue
        found[commit] = (*found.get(commit, ()), path.relative_to(folder).as_posix())
    return found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(islice(entries, 2 * MAX_FILES), key=lambda entry: entry.name)
    except OSError:
        return []


def _folders(folder: Path) -> Iterator[Path]:
    return (folder / entry.name for entry in _entries(folder) if _is_folder(entry))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _files(folder: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    for entry in _entries(folder):
        if not entry.name.isprintable():
            continue
        if entry.is_symlink() or not _is_folder(entry):
            yield folder / entry.name
        elif depth:
            yield from _files(folder / entry.name, depth - 1)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
