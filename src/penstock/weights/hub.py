"""Finds a model's files: a folder, or a GGUF file. huggingface_hub downloads those of a hub id into its cache.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean there. huggingface_hub resumes a download whose
connection breaks and checks each file's size; digests are checked here.
"""

import glob
import hashlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from penstock.gguf import is_gguf
from penstock.weights.gguf_choice import HubError, choose_gguf, holds_gguf, model_in_folder
from penstock.weights.packaged import locate_packaged

CONFIG_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
UNSAFE = (".bin", ".pt", ".pth", ".ckpt")  # pickles: reading one can run code
TIMEOUT = 10.0  # seconds for the hub to describe a model
VERIFIERS = 4

_FOLDER_ALONE = ("\0",)  # a pattern that no file matches

_HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(:(?P<tag>[A-Za-z0-9][A-Za-z0-9._/-]{0,255}))?"
)

logger = logging.getLogger(__name__)


def locate_model(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    progress: bool = True,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> Path:
    """The folder of a model, or its GGUF file. `name` is a path, the name of a packaged model, or a hub id, which is
    downloaded: `org/name`, without its weights if `weights` is false, or `org/name:Q4_K_M`, the GGUF file of that
    quantisation.

    A folder that holds one model in GGUF and no safetensors stands for its file. If the hub cannot be reached, a
    complete snapshot in the cache is used. Raises HubError. `endpoint` and `cache` replace HF_ENDPOINT and
    HF_HUB_CACHE, which huggingface_hub reads only once.
    """
    path = Path(name).expanduser()
    if name and path.exists():
        if revision is not None:
            kind = "folder" if path.is_dir() else "file"
            raise HubError(f"{name} is a {kind}, which has no revisions; leave --revision {revision} out")
        if path.is_dir():
            return model_in_folder(path)
        if is_gguf(path):
            return path
        raise HubError(f"{name} is a file; name a GGUF file, or the folder of a model's config.json and safetensors")
    packaged = locate_packaged(name)
    if packaged is not None:
        if revision is not None:
            raise HubError(f"{name} has no revisions; leave --revision {revision} out")
        return packaged
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name or "--" in name:
        raise HubError(
            f"{name!r} is neither a folder, a GGUF file nor a hub id such as 'org/model' or 'org/model:Q4_K_M'; check "
            "the path"
        )
    patterns = CONFIG_FILES + TOKENIZER_FILES + (WEIGHT_FILES if weights else ())
    return _Snapshot(match["id"], match["tag"], revision, patterns, endpoint, cache).locate(progress)


class _Snapshot:
    """One revision of a model, on the hub or in the cache. `patterns` match the files of a model that is not in GGUF;
    `tag` is the quantisation of one that is."""

    def __init__(
        self,
        name: str,
        tag: str | None,
        revision: str | None,
        patterns: Sequence[str],
        endpoint: str | None,
        cache: Path | None,
    ) -> None:
        from huggingface_hub import HfApi  # imported here: it takes a while, and a folder does not need it

        self.name = name
        self.tag = tag
        self.revision = revision
        self.patterns = patterns
        self.cache = cache
        self.api: Any = HfApi(endpoint=endpoint, library_name="penstock")

    def locate(self, progress: bool) -> Path:
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HFValidationError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )

        try:
            info = self.api.model_info(self.name, revision=self.revision, files_metadata=True, timeout=TIMEOUT)
        except GatedRepoError:
            raise HubError(
                f"{self.name} is gated: accept its terms at {self.api.endpoint}/{self.name}, then set HF_TOKEN to a "
                "token of that account"
            ) from None
        except RepositoryNotFoundError:
            raise HubError(
                f"the hub has no model {self.name}, or it is private: check the name, or set HF_TOKEN to a token that "
                "may read it"
            ) from None
        except RevisionNotFoundError:
            raise HubError(f"{self.name} has no revision {self.revision!r}; check --revision") from None
        except HFValidationError as error:
            raise HubError(f"{self.name!r} is not a hub id: {error}") from None
        except Exception as error:  # its type depends on huggingface_hub's HTTP library
            if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
                raise HubError(f"the hub refuses access to {self.name}: check the token in HF_TOKEN") from None
            return self._from_cache(error)
        return self._download(info, progress)

    def _from_cache(self, reason: Exception) -> Path:
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            model = self._cached_gguf() or self._snapshot_folder(self.patterns, local_files_only=True)
        except LocalEntryNotFoundError:
            raise HubError(
                f"the hub at {self.api.endpoint} cannot be reached ({_brief(reason)}), and "
                f"{self.name} is not complete in the cache; connect, or give a model's folder"
            ) from reason
        logger.warning("the hub cannot be reached (%s); using the cached snapshot %s", _brief(reason), model)
        return model

    def _cached_gguf(self) -> Path | None:
        """The GGUF file in the cache; None if this is a model of another format."""
        folder = self._snapshot_folder(_FOLDER_ALONE, local_files_only=True)
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        if self.tag is None and not holds_gguf(files):
            return None
        return folder / choose_gguf(f"the cache of {self.name}", files, self.tag)[0]

    def _snapshot_folder(self, patterns: Sequence[str], *, local_files_only: bool = False) -> Path:
        return Path(
            self.api.snapshot_download(
                self.name,
                revision=self.revision,
                cache_dir=self.cache,
                local_files_only=local_files_only,
                allow_patterns=list(patterns),
            )
        )

    def _download(self, info: Any, progress: bool) -> Path:
        from huggingface_hub import try_to_load_from_cache

        names = [file.rfilename for file in info.siblings or []]
        gguf = self._gguf_files(names)
        if gguf:
            wanted = [file for file in info.siblings or [] if file.rfilename in gguf]
            patterns: Sequence[str] = [glob.escape(name) for name in gguf]
        else:
            wanted = [file for file in info.siblings or [] if _matches(file.rfilename, self.patterns)]
            patterns = self.patterns
            _check_files(self.name, names, [file.rfilename for file in wanted], weights="model.safetensors" in patterns)
        fresh = [
            file
            for file in wanted
            if not isinstance(
                try_to_load_from_cache(self.name, file.rfilename, cache_dir=self.cache, revision=info.sha), str
            )
        ]
        try:
            with _progress_bars(progress and sys.stderr.isatty()):
                folder = self._snapshot_folder(patterns)
        except Exception as error:  # as above, and a full disk
            raise HubError(
                f"{self.name} could not be downloaded ({_brief(error)}); run it again, files that are complete are kept"
            ) from error
        if folder.name != info.sha:
            raise HubError(f"{self.name} changed on the hub while it was downloaded; run it again")
        _verify(self.name, folder, fresh)
        return folder / gguf[0] if gguf else folder

    def _gguf_files(self, names: Sequence[str]) -> list[str]:
        """The files of a model in GGUF among a repository's files; none if this is a model of another format."""
        if self.tag is None and not holds_gguf(names):
            return []
        return choose_gguf(f"{self.name} on the hub", names, self.tag)


def _check_files(name: str, present: list[str], wanted: list[str], *, weights: bool) -> None:
    if "config.json" not in wanted:
        raise HubError(f"{name} on the hub is not a model in the Hugging Face layout: it has no config.json")
    if weights and not any(file.endswith(".safetensors") for file in wanted):
        unsafe = [file for file in present if file.endswith(UNSAFE)]
        why = f"; {unsafe[0]} is not read, as loading it can run code: use a revision in safetensors" if unsafe else ""
        raise HubError(f"{name} on the hub has no model.safetensors{why}")


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file lies at the top of a repository and matches a pattern."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)


def _verify(name: str, folder: Path, files: list[Any]) -> None:
    """Compare files with the hub's digests. A damaged file is removed, so that the next run downloads it again."""
    if files:
        logger.info("verifying %d files of %s", len(files), name)
    with ThreadPoolExecutor(VERIFIERS, "verify") as pool:
        good = list(pool.map(lambda file: _is_intact(folder / file.rfilename, file), files))
    damaged = [file.rfilename for file, intact in zip(files, good, strict=True) if not intact]
    for file in damaged:
        link = folder / file
        link.resolve().unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    if damaged:
        raise HubError(
            f"{name}: {', '.join(damaged)} came with a wrong checksum and has been removed from the cache; run it "
            "again; if that does not help, use another connection or another mirror of the hub"
        )


def _is_intact(path: Path, file: Any) -> bool:
    """Whether a file has its digest: SHA-256 in large file storage, else the SHA-1 of the git blob."""
    with path.open("rb") as stream:
        if file.lfs is not None:
            return bool(hashlib.file_digest(stream, "sha256").hexdigest() == file.lfs.sha256)
        content = stream.read()
    header = b"blob %d\0" % len(content)
    digest = hashlib.sha1(header + content, usedforsecurity=False).hexdigest()
    return file.blob_id is None or bool(digest == file.blob_id)


@contextmanager
def _progress_bars(wanted: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if wanted or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
