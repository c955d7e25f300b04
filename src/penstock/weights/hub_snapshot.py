"""One revision of a model on a hub, and in Hugging Face's cache."""

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from penstock.config import format_bytes
from penstock.observe.progress import download_progress
from penstock.observe.reporting import reporting
from penstock.weights.gguf_choice import HubError, HubFailure, choose_gguf, holds_gguf
from penstock.weights.hub_cache import ModelFolder
from penstock.weights.hub_download import Damaged, Download, HubFile
from penstock.weights.hub_listing import ListedFile, Listing, check_content, check_name, interruptible, read_listing
from penstock.weights.local_models import did_you_mean

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
LICENCE_FILES = ("README.md", "LICENSE")  # fetched if they are there, for `penstock show`
MAX_LICENCE_BYTES = 1 << 20
UNSAFE = (".bin", ".pt", ".pth", ".ckpt")  # pickles: reading one can run code
_FOLDER_ALONE = ("\0",)  # a pattern that no file matches

logger = logging.getLogger(__name__)


class Snapshot:
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
        self.watch: Callable[[int, int], None] | None = None  # gets the bytes of large files done and in total
        self._done = (0, 0)  # these
        self.api: Any = HfApi(endpoint=endpoint, library_name="penstock")

    def locate(self, progress: bool, *, fallback: bool = True) -> Path:
        """The path after a download of what is missing. With `fallback`, the path in the cache if the hub cannot be
        reached."""
        try:
            with _reporting(f"{self.name}: waiting for {self.api.endpoint}", progress):
                listing = interruptible(self._listing, self._check)
        except HubError:
            raise
        except Exception as error:  # its type depends on huggingface_hub's HTTP library
            refusal = self._refusal(error)
            reason = refusal or f"the hub at {self.api.endpoint} cannot be reached ({_brief(error)})"
            kind = HubError if refusal or _offline(error) else HubFailure
            if not fallback:
                raise kind(reason if refusal else f"{reason}: {_remedy(error)}") from error
            return self._from_cache(kind(reason), refused=refusal is not None)
        return self._download(listing, progress)

    def _listing(self) -> Listing:
        return read_listing(self.api.endpoint, self.name, self.revision, self._headers())

    def _check(self) -> None:
        """Raises what `watch` raises if the download is no longer wanted."""
        if self.watch is not None:
            self.watch(*self._done)

    def _refusal(self, error: Exception) -> str | None:
        """Returns the message for the user if the hub has answered and refuses; None if it cannot be reached."""
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return (
                f"{self.name} is gated: accept its terms at {self.api.endpoint}/{self.name}, then set HF_TOKEN to a "
                "token of that account"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"the hub has no model {self.name}, or it is private: check the name, or set HF_TOKEN to a token that "
                f"may read it{did_you_mean(self.name, self.cache)}"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self.name} has no revision {self.revision!r}; check --revision"
        if isinstance(error, errors.HFValidationError):
            return f"{self.name!r} is not a hub id: {error}"
        if isinstance(error, errors.HfHubHTTPError) and error.response.status_code in (401, 403):
            return f"the hub refuses access to {self.name}: check the token in HF_TOKEN"
        return None

    def cached(self) -> Path:
        """The path in the cache."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            return self._in_cache()
        except LocalEntryNotFoundError:
            whole = f"{self.name}:{self.tag}" if self.tag else self.name
            raise HubError(
                f"{whole} is not complete on this machine: run penstock pull {whole}{did_you_mean(whole, self.cache)}"
            ) from None

    def _from_cache(self, reason: HubError, *, refused: bool) -> Path:
        """The path in the cache, also of a model that the hub no longer has."""
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            model = self._in_cache()
        except (LocalEntryNotFoundError, HFValidationError, HubError) as error:
            if refused:
                raise reason from None
            if isinstance(error, HubError):
                raise
            raise type(reason)(
                f"{reason}, and {self.name} is not complete in the cache; connect, or give a model's folder"
            ) from None
        logger.warning("%s; using the cached snapshot %s", reason, model)
        return model

    def _in_cache(self) -> Path:
        return self._cached_gguf() or self._cached_folder(self.patterns)

    def _cached_gguf(self) -> Path | None:
        """The GGUF file in the cache; None if this is a model of another format."""
        folder = self._cached_folder(_FOLDER_ALONE)
        files = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        if self.tag is None and not holds_gguf(files):
            return None
        return folder / choose_gguf(f"the cache of {self.name}", files, self.tag)[0]

    def _cached_folder(self, patterns: Sequence[str]) -> Path:
        return Path(
            self.api.snapshot_download(
                self.name,
                revision=self.revision,
                cache_dir=self.cache,
                local_files_only=True,
                allow_patterns=list(patterns),
            )
        )

    def _download(self, listing: Listing, progress: bool) -> Path:
        from huggingface_hub import constants

        for file in listing.files:
            check_name(self.name, file)
        names = [file.name for file in listing.files]
        gguf = self._gguf_files(names)
        if gguf:
            wanted = listing.named(lambda name: name in gguf)
        else:
            wanted = listing.named(lambda name: _matches(name, self.patterns))
            weights = "model.safetensors" in self.patterns
            _check_files(self.name, names, [file.name for file in wanted], weights=weights)
        wanted += [
            file
            for file in listing.files
            if file.name in LICENCE_FILES and 0 < file.size <= MAX_LICENCE_BYTES and file not in wanted
        ]
        for file in wanted:
            check_content(self.name, file)
        folder = ModelFolder(Path(self.cache or constants.HF_HUB_CACHE), self.name)
        files = [self._hub_file(file, folder, listing.commit) for file in wanted]
        fresh = [file for file in files if not file.blob.exists()]
        large = {file.name for file in wanted if file.large}
        self._check_sizes(fresh)
        try:
            self._fetch([file for file in fresh if file.name in large], progress)
            with _no_progress_bars(), _reporting(f"{self.name}: downloading small files", progress):
                small = [file for file in fresh if file.name not in large]
                Download(small, self._headers()).run(lambda size: self._check())
        except Damaged as error:
            raise _wrong_checksum(self.name, [str(error)]) from None
        except Exception as error:  # its type depends on huggingface_hub's HTTP library, or the disk is full
            if refusal := self._refusal(error):  # a gated model is described to everybody
                raise HubError(refusal) from None
            raise HubFailure(
                f"{self.name} could not be downloaded ({_brief(error)}); run it again: it continues where it stopped"
            ) from error
        snapshot = folder.link(listing.commit, [(file.name, file.digest) for file in files])
        folder.list_files(listing)
        folder.refer(self.revision or "main", listing.commit)
        return snapshot / gguf[0] if gguf else snapshot

    def _hub_file(self, file: ListedFile, folder: ModelFolder, commit: str) -> HubFile:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.name, file.name, revision=commit, endpoint=self.api.endpoint)
        return HubFile(file.name, file.size, file.digest, url, folder.blob(file.digest))

    def _check_sizes(self, files: Sequence[HubFile]) -> None:
        """Raises HubError for a file that is too large for HTTP, or if the cache's disk has not the space."""
        from huggingface_hub import constants

        for file in files:
            if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
                raise HubError(
                    f"{file.name} of {self.name} has {file.size} bytes; the limit of a download is "
                    f"{constants.MAX_HTTP_DOWNLOAD_SIZE}: run hf download {self.name} {file.name}, then this again"
                )
        needed = sum(file.size - file.present() for file in files)
        folder = Path(self.cache or constants.HF_HUB_CACHE).absolute()
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise HubFailure(
                f"{self.name} needs {format_bytes(needed)} more, but the disk of {folder} has {format_bytes(free)} "
                "free: remove a model (penstock list, penstock rm NAME), or set HF_HOME to a folder on another disk"
            )

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        headers: dict[str, str] = build_hf_headers(library_name="penstock")
        return headers

    def _fetch(self, missing: Sequence[HubFile], progress: bool) -> None:
        if not missing:
            return
        total, done = sum(file.size for file in missing), sum(file.present() for file in missing)
        if progress:
            count = f"{len(missing)} file{'s' if missing[1:] else ''}"
            kept = f"; {format_bytes(done)} are there from an earlier run" if done else ""
            print(f"{self.name}: downloading {count}, {format_bytes(total)}{kept}", file=sys.stderr, flush=True)
        shown = download_progress(self.name, total, done) if progress else nullcontext(lambda size: None)
        with _no_progress_bars(), shown as report:

            def watched(size: int) -> None:
                self._done = size, total
                report(size)
                self._check()

            Download(missing, self._headers()).run(watched)

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


def _offline(error: Exception) -> bool:
    """Whether the user has turned the hub off."""
    from huggingface_hub import errors

    return isinstance(error, errors.OfflineModeIsEnabled)


def _remedy(error: Exception) -> str:
    """What to do if the hub did not answer."""
    if _offline(error):
        return "unset HF_HUB_OFFLINE to download"
    return (
        "check the network and its proxy (HTTPS_PROXY), or set HF_ENDPOINT to a mirror; penstock list has what is here"
    )


def _brief(error: Exception) -> str:
    if _offline(error):
        return "HF_HUB_OFFLINE is set"
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file lies at the top of a repository and matches a pattern."""
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)


def _wrong_checksum(name: str, files: Sequence[str]) -> HubFailure:
    return HubFailure(
        f"{name}: {', '.join(files)} came with a wrong checksum and has been removed from the cache; run it again; if "
        "that does not help, use another connection or another mirror of the hub"
    )


def _reporting(text: str, wanted: bool) -> AbstractContextManager[object]:
    return reporting(text) if wanted else nullcontext()


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keeps huggingface_hub from showing bars of its own."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
