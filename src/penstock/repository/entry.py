"""Reads the folder of a model: its settings, its versions, and what identifies a version."""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.config.state import cache_home
from penstock.declared.settings import DEFAULTS
from penstock.messages.tensors import LoadFailed
from penstock.repository.bucket import Bucket
from penstock.repository.digests import FolderDigests
from penstock.repository.files import ModelFiles, local_files
from penstock.repository.settings import (
    EXPORT,
    FILES,
    MAX_BYTES,
    Kind,
    ModelSettings,
    SettingsError,
    chosen_versions,
    members,
    read_yaml,
)
from penstock.repository.triton import of_config, read_pbtxt

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
GENERATION = "generation"  # the file in the folder that says what is wanted
OURS, TRITONS = "model.yaml", "config.pbtxt"
MAX_MODELS = 10_000
CACHE_BYTES: int = DEFAULTS["repository_cache"]
_OF_SUFFIX: dict[str, Kind] = {".onnx": "onnx", ".pt2": "torch"}
_REFUSED = {
    "model.pt": ("TorchScript", EXPORT),
    "saved_model.pb": ("TensorFlow", "convert it: python -m tf2onnx.convert --saved-model FOLDER --output model.onnx"),
    "model.plan": ("TensorRT", "export the model that it was made of to ONNX"),
}
_log = logging.getLogger("penstock.repository")


class Target(NamedTuple):
    """A version of a model that should be ready."""

    name: str
    version: int
    digest: str  # of the settings and of all files: what the version is
    size: int  # bytes of its files
    folder: Path
    settings: ModelSettings
    held: object = None  # keeps the files in the cache of a bucket

    @property
    def key(self) -> tuple[str, int, str]:
        return self.name, self.version, self.digest


class Entry(NamedTuple):
    """A model, and the versions that its policy chooses."""

    name: str
    settings: ModelSettings
    targets: tuple[Target, ...]


class _Override(NamedTuple):
    """What came with a request to load a model."""

    settings: ModelSettings
    folder: Path | None  # with its files; None: those of the repository


class Folder:
    """A folder with a folder for each model, on this machine or in an object store."""

    def __init__(self, where: str | Path, cache_bytes: int = CACHE_BYTES) -> None:
        """`where` is a path, or such as s3://bucket/prefix, whose files come into a cache of `cache_bytes`. Raises
        ValueError if there is no such folder."""
        self._digests = FolderDigests()
        self._bucket: Bucket | None = None
        if "://" in str(where):
            cache = cache_home(os.environ) / "penstock" / "repository"
            self._bucket = Bucket(str(where), cache, cache_bytes, self._digests)
            self.path = self._bucket.path
        elif Path(where).is_dir():
            self.path = Path(where).resolve()
        else:
            raise ValueError(f"--repository is {str(where)!r}: there is no such folder; create it, or name another one")
        self._overrides: dict[str, _Override] = {}  # settings and files that came with a request, by model

    def names(self) -> list[str]:
        """Returns the names of the models in the folder, sorted."""
        if self._bucket is None:
            there = [entry.name for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False)]
        else:
            there = self._bucket.names()
        return sorted(filter(NAME.fullmatch, there))[:MAX_MODELS]

    def generation(self) -> tuple[Any, Path] | None:
        """Returns what changes with the content of the file that says what is wanted, and the file; None: there is
        none. Raises OSError."""
        if self._bucket is not None:
            return self._bucket.generation(GENERATION)
        path = self.path / GENERATION
        if not path.exists():
            return None
        state = path.stat()
        return (state.st_ino, state.st_mtime_ns), path

    def kind(self, name: str) -> Kind | None:
        """Returns the kind of a model, without reading its files. Raises LoadFailed."""
        try:
            files = self._files(name)
            settings = _settings(files.folder)
            return settings.kind or _with_kind(settings, files).kind
        except (SettingsError, OSError) as error:
            raise LoadFailed(_unread(name, error)) from None

    def members(self, name: str) -> set[str]:
        """Returns the models of the folder that a pipeline needs; none if it cannot be read."""
        try:
            return members(_settings(self._files(name).folder).steps) & set(self.names())
        except (SettingsError, OSError):
            return set()

    def read(
        self,
        name: str,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        choose: Callable[[str, list[int]], tuple[int, ...]] = lambda name, there: (),
    ) -> Entry:
        """Reads a model. `config` is a JSON text with Triton's settings, which replace those of the folder; `files` are
        its versions, by path within the folder. Both hold until `forget`. `choose` returns the versions to load, of
        those that are there; (): the settings decide. Raises LoadFailed."""
        _check_name(name)
        try:
            if files and config is None:
                raise SettingsError("files came without a config; send both")
            if config is not None:
                settings = _config(config)
                written = _written(files) if files else None
                self.forget(name)
                self._overrides[name] = _Override(settings, written)
            override = self._overrides.get(name)
            there = local_files(override.folder) if override and override.folder else self._files(name)
            settings = _settings(there.folder) if override is None else override.settings
            return self._entry(name, there, settings, choose)
        except (SettingsError, OSError) as error:
            raise LoadFailed(_unread(name, error)) from None

    def forget(self, name: str) -> None:
        """Deletes the settings and files that came with a request to load a model."""
        override = self._overrides.pop(name, None)
        if override is not None and override.folder is not None:
            shutil.rmtree(override.folder, ignore_errors=True)

    def _files(self, name: str) -> ModelFiles:
        """The files of a model. Raises SettingsError and OSError."""
        if self._bucket is not None:
            found = self._bucket.open(name)
        else:
            folder = self.path / name
            found = local_files(folder) if folder.is_dir() and not folder.is_symlink() else None
        if found is None:
            raise SettingsError(f"there is no folder {name!r} in it")
        return found

    def _entry(
        self, name: str, files: ModelFiles, settings: ModelSettings, choose: Callable[[str, list[int]], tuple[int, ...]]
    ) -> Entry:
        there = list(files.versions)
        if settings.kind is None:
            settings = _with_kind(settings, files)
        if not there and (settings.kind == "pipeline" or settings.model):
            there = [1]  # it has no files
        chosen = list(choose(name, there))
        numbers = chosen or chosen_versions(settings, there)
        if not chosen and isinstance(settings.versions, tuple) and (missing := set(settings.versions) - set(numbers)):
            _log.warning("%s has no version %s, which its settings name", name, ", ".join(map(str, sorted(missing))))
        if not numbers:
            raise SettingsError(f"there is no version: put the model's files into {name}/1")
        targets = []
        for number in numbers:
            names = files.versions.get(number, ())
            if settings.kind in FILES and (settings.file or FILES[settings.kind]) not in names:
                _refuse(names)
            version, held = files.bring(number)
            digest, size = self._digests.of(version)
            text = json.dumps([repr(settings), digest], sort_keys=True)
            digest = hashlib.sha256(text.encode()).hexdigest()
            targets.append(Target(name, number, digest, size, version, settings, held))
        return Entry(name, settings, tuple(targets))


def _check_name(name: str) -> None:
    """Raises LoadFailed for a name that no model can have."""
    if not name.strip():
        raise LoadFailed("Model name cannot be empty. Please enter a valid name to deploy.")
    if "/" in name or name.strip() == "..":
        raise LoadFailed(f"model name must not contain path traversal characters, but is {name[:100]!r}")
    if NAME.fullmatch(name) is None:
        raise LoadFailed(
            _unread(name, "the name of a model has letters, digits and _ . + -, and does not begin with a dot")
        )


def _unread(name: str, why: object) -> str:
    return f"failed to load {name[:100]!r}, failed to poll from model repository: {why}"


def _config(text: str) -> ModelSettings:
    """The settings in a JSON text of Triton's ModelConfig. Raises SettingsError."""
    if len(text) > MAX_BYTES:
        raise SettingsError(f"config has {len(text)} characters; the limit is {MAX_BYTES}")
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise SettingsError("config must be a JSON object")
        return of_config(config)
    except (json.JSONDecodeError, RecursionError) as error:
        raise SettingsError(f"config is not valid JSON: {error}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise SettingsError(f"config: {error}") from None


def _settings(folder: Path) -> ModelSettings:
    """The settings in a model's folder; those of an empty file if there is none. Raises SettingsError and OSError."""
    ours, tritons = folder / OURS, folder / TRITONS
    if ours.exists() and tritons.exists():
        raise SettingsError(f"the folder has {OURS} and {TRITONS}; keep one of them")
    for path, read in ((ours, read_yaml), (tritons, read_pbtxt)):
        if path.exists():
            if path.stat().st_size > MAX_BYTES:
                raise SettingsError(f"{path.name} has {path.stat().st_size} bytes; the limit is {MAX_BYTES}")
            try:
                return read(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                raise SettingsError(f"{path.name} is not UTF-8") from None
            except SettingsError as error:
                raise SettingsError(f"{path.name}: {error}") from None
    return ModelSettings()


def _with_kind(settings: ModelSettings, files: ModelFiles) -> ModelSettings:
    """The settings with the kind that the files of the newest version have. Raises SettingsError."""
    kind: Kind | None = "llm" if settings.model else None
    newest = max(files.versions, default=1)
    names = files.versions.get(newest, ())
    if settings.steps:
        kind = "pipeline"
    elif settings.file:
        kind = _OF_SUFFIX.get(Path(settings.file).suffix)
    elif found := [each for each, name in FILES.items() if name in names]:
        kind = found[0]
    elif "config.json" in names or any(name.endswith(".gguf") for name in names):
        kind = "llm"
    if kind is None:
        _refuse(names)
        raise SettingsError(
            f"the kind of model is not known: {newest} has neither {', '.join(FILES.values())} nor a language "
            "model; set kind"
        )
    return msgspec.structs.replace(settings, kind=kind)


def _refuse(names: Collection[str]) -> None:
    """Raises SettingsError, which says how to convert it, for a file of a format that is not served."""
    for name, (what, how) in _REFUSED.items():
        if name in names:
            raise SettingsError(f"{name} is a {what} model, which is not served; {how}")


def _written(files: Mapping[str, bytes]) -> Path:
    """Writes files that came with a request to a new folder. Raises SettingsError for a path that leaves it."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-model-"))
    try:
        for name, data in files.items():
            path = Path(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(path.parts) > 8:
                raise SettingsError(f"file {name[:100]!r} is not within the model's folder; send VERSION/FILE")
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    except (SettingsError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder
