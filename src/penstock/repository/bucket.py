"""A repository in an object store: its files come into a cache on disk, and are read from there as from a folder.

The cache has a folder for each bucket, in it one for each model, and in that the files beside the versions and a folder
for each version that was loaded. Its name has the number and a digest of the objects' ETags, so that a version whose
objects change gets another folder. A file beside it has the SHA-256 of its content. Who uses a version holds a lock on
that file; versions without a lock are deleted, the least recently used first, when others need the space.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock.config.sizes import format_bytes
from penstock.repository.digests import FolderDigests
from penstock.repository.files import ModelFiles, is_version
from penstock.repository.settings import SettingsError

SCHEMES = ("s3", "gs", "az")
PIECE_BYTES = 64 << 20  # of a request for a part of an object
CONNECTIONS = 8  # for the pieces of a version
MAX_BESIDE = 16 << 20  # bytes of a file beside the versions: settings, names of classes
MAX_PARTS = 8  # folders that a key may name below the model's
LOOK_SECONDS = 10.0  # between listings of the bucket
_CLIENT = {"connect_timeout": "5s", "timeout": "600s"}
_RETRIES: dict[str, Any] = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


class _Object(NamedTuple):
    key: str  # below the repository
    path: str  # within the model's folder, or the version's
    size: int
    tag: str | None  # the ETag


class Bucket:
    """The files of a repository in an object store."""

    def __init__(self, url: str, cache: Path, cache_bytes: int, digests: FolderDigests) -> None:
        """`url` is such as s3://bucket/prefix. `cache` is the folder for all buckets, and `cache_bytes` what it may
        hold. Raises ValueError if the bucket cannot be listed."""
        if not url.startswith(tuple(f"{scheme}://" for scheme in SCHEMES)):
            raise ValueError(f"--repository is {url!r}; it must be a folder, or begin with s3://, gs:// or az://")
        if importlib.util.find_spec("obstore") is None:
            raise ValueError(f"--repository is {url!r}, which needs obstore: pip install 'penstock[s3]'")
        self._url, self._cache, self._limit, self._digests = url, cache, cache_bytes, digests
        endpoint = _endpoint()
        try:
            self._store = _open(url, endpoint)
            self.path = cache / hashlib.sha256(f"{endpoint}\0{url.rstrip('/')}".encode()).hexdigest()[:16]
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._clean()
            self._beside: dict[Path, str | None] = {}  # the ETags of files beside versions
            self._room = threading.Lock()
            self._coming = 0  # bytes of versions that are being fetched
            self._looked = 0.0
            self._names: list[str] = []
            self._generation: _Object | None = None
            self._look()
        except OSError as error:
            raise ValueError(f"--repository is {url!r}: {error}") from None

    def names(self) -> list[str]:
        """Returns the names of the folders in it, as they were at the last look."""
        return self._names

    def generation(self, name: str) -> tuple[Any, Path] | None:
        """Looks at the bucket, at most each LOOK_SECONDS. Returns what changes with a file's content, and the file;
        None: there is none. Raises OSError."""
        if time.monotonic() > self._looked + LOOK_SECONDS:
            self._look()
        path = self.path / name
        found = self._generation
        if found is None:
            return None
        self._fetch_beside(found, path)
        return found.tag, path

    def open(self, name: str) -> ModelFiles | None:
        """Fetches the files of a model beside its versions. Returns None if there is no such model. Raises
        SettingsError and OSError."""
        folder, versions = self.path / name, dict[int, list[_Object]]()
        beside: dict[str, _Object] = {}
        for found in self._list(name):
            first, _, rest = found.path.partition("/")
            if rest and is_version(first):
                versions.setdefault(int(first), []).append(found._replace(path=rest))
            elif not rest and not first.startswith("."):
                beside[first] = found
        if not versions and not beside:
            return None
        folder.mkdir(exist_ok=True)
        for each in folder.iterdir():
            if each.is_file() and not each.name.startswith(".") and each.name not in beside:
                each.unlink()
        for file, found in beside.items():
            if found.size > MAX_BESIDE:
                raise SettingsError(
                    f"{file} has {found.size} bytes; the limit of a file beside the versions is {MAX_BESIDE}"
                )
            self._fetch_beside(found, folder / file)
        shown = {number: {found.path.split("/")[0] for found in objects} for number, objects in versions.items()}
        return ModelFiles(folder, shown, lambda number: self._bring(folder, number, versions.get(number, [])))

    def _look(self) -> None:
        """Lists the models, and the file that says what is wanted. Raises OSError."""
        import obstore

        with _explained(self._url):
            found = obstore.list_with_delimiter(self._store)
        self._names = sorted(found["common_prefixes"])
        objects = {each["path"]: each for each in found["objects"]}
        there = objects.get("generation")
        self._generation = None if there is None else _Object("generation", "", there["size"], there["e_tag"])
        self._looked = time.monotonic()

    def _list(self, name: str) -> list[_Object]:
        """The objects of a model. Raises SettingsError for a key that is no path within it, and OSError."""
        import obstore

        with _explained(self._url):
            listed = [each for page in obstore.list(self._store, name, chunk_size=1000) for each in page]
        found = []
        for each in listed:
            key, size = each["path"], each["size"]
            parts = key.split("/")[1:]
            if not size and "." not in (parts or [""])[-1]:
                continue  # stores' own tools make such objects for folders
            wrong = any(part in ("", ".", "..") or "\0" in part or len(part) > 200 for part in parts)
            if wrong or not 1 <= len(parts) <= MAX_PARTS:
                raise SettingsError(f"the object {key[:200]!r} has no name that a file can have; rename it")
            found.append(_Object(key, "/".join(parts), size, each["e_tag"]))
        return sorted(found)

    def _bring(self, folder: Path, number: int, objects: list[_Object]) -> tuple[Path, BinaryIO | None]:
        """Returns the folder of a version, with its files, and what keeps it in the cache while it is referenced.
        Raises SettingsError and OSError."""
        if not objects:
            return folder / str(number), None
        text = "".join(f"{each.path}\0{each.size}\0{each.tag}\n" for each in objects)
        name = f"{number}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        place, record = folder / name, folder / f".{name}.sha256"
        for _ in range(3):
            if not place.is_dir():
                self._download(objects, place, record)
            held = _held(record, fcntl.LOCK_SH)
            if held is not None and place.is_dir():
                digest, size = self._digests.of(place)
                if held.read().decode() == f"{digest} {size}\n":
                    os.utime(record)
                    return place, held
                shutil.rmtree(place, ignore_errors=True)  # the disk has lost something: once more
        raise OSError(f"{place} changes while it is used; is the disk well?")

    def _download(self, objects: list[_Object], place: Path, record: Path) -> None:
        """Fetches a version. Its folder and its record are there after all of its files."""
        size = sum(each.size for each in objects)
        self._make_room(size)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=self._cache))
        try:
            with open(part / "lock", "wb") as lock, ThreadPoolExecutor(CONNECTIONS) as pool:
                fcntl.flock(lock, fcntl.LOCK_EX)
                files = part / "files"
                list(pool.map(lambda piece: self._fetch(*piece), _pieces(objects, files)))
                digest, count = self._digests.of(files)
                (part / "record").write_text(f"{digest} {count}\n")
                os.replace(part / "record", record)
                with contextlib.suppress(OSError):  # another server was first
                    os.rename(files, place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            with self._room:
                self._coming -= size

    def _fetch(self, found: _Object, path: Path, start: int, end: int) -> None:
        """Writes a part of an object to a file. Raises OSError."""
        import obstore

        options: Any = {"range": (start, end)} if end > start else {}
        if found.tag is not None:
            options["if_match"] = found.tag
        with _explained(self._url), path.open("r+b") as file:
            file.seek(start)
            for chunk in obstore.get(self._store, found.key, options=options).stream():
                file.write(chunk)
            size = file.tell() - start
        if size != end - start:
            raise OSError(f"{self._url}: {found.key} gave {size} bytes instead of {end - start}")

    def _fetch_beside(self, found: _Object, path: Path) -> None:
        """Brings a file beside versions up to date."""
        if path.exists() and found.tag is not None and self._beside.get(path) == found.tag:
            return
        new = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        new.touch()
        try:
            self._fetch(found, new, 0, found.size)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)
        self._beside[path] = found.tag

    def _make_room(self, size: int) -> None:
        """Deletes versions that nobody uses, until there is room for `size` bytes. Raises SettingsError."""
        with self._room:
            records = [(record.stat().st_mtime, record) for record in self._cache.glob("*/*/.*.sha256")]
            sizes = {record: int(record.read_text().split()[1]) for _, record in records}
            total = sum(sizes.values()) + self._coming
            for _, record in sorted(records):
                if total + size <= self._limit:
                    break
                held = _held(record, fcntl.LOCK_EX)
                if held is not None:
                    with held:
                        shutil.rmtree(record.with_name(record.name[1:].removesuffix(".sha256")), ignore_errors=True)
                        record.unlink(missing_ok=True)
                    total -= sizes[record]
            if total + size > self._limit:
                raise SettingsError(
                    f"it has {format_bytes(size)}, and the cache on disk may have {format_bytes(self._limit)}, of "
                    f"which {format_bytes(total)} are in use; unload a model, or set a larger --repository-cache"
                )
            self._coming += size

    def _clean(self) -> None:
        """Deletes what downloads that were killed have left."""
        for part in self._cache.glob(".part-*"):
            held = _held(part / "lock", fcntl.LOCK_EX)
            if held is not None:
                held.close()
                shutil.rmtree(part, ignore_errors=True)


def _pieces(objects: list[_Object], folder: Path) -> Iterator[tuple[_Object, Path, int, int]]:
    """Makes the files of objects. Returns the parts to fetch: an object, its file, and the bounds."""
    for each in objects:
        path = folder / each.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(each.size)
        for start in range(0, each.size, PIECE_BYTES):
            yield each, path, start, min(start + PIECE_BYTES, each.size)


def _held(path: Path, kind: int) -> BinaryIO | None:
    """Locks a file. Returns it, or None if it does not exist or another one holds it. Closing it frees the lock."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except BlockingIOError:
        pass
    file.close()
    return None


def _endpoint() -> str:
    """The address of the store if it is not the cloud's own, by the variables of AWS's tools."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _open(url: str, endpoint: str) -> Any:
    from obstore import store

    options: Any = {**_CLIENT, "allow_http": endpoint.startswith("http://")}
    config: Any = {"endpoint": endpoint} if endpoint and url.startswith("s3:") else {}
    with _explained(url):
        opened: Any = store.from_url  # it is typed for one cloud at a time
        return opened(url, client_options=options, retry_config=_RETRIES, **config)


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Raises an OSError that says what is wrong in place of the library's errors, which have pages of detail."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        text = str(error).split("\n\nDebug source")[0]
        code = next(iter(re.findall(r"<Code>(\w{1,60})</Code>", text)), "")
        if code == "NoSuchBucket":
            raise OSError(f"{url}: there is no such bucket") from None
        if isinstance(error, PermissionError) or re.search(r"status code: 40[13]|AccessDenied", text):
            why = code or "401 or 403"
            raise OSError(
                f"{url}: access denied ({why}); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, and "
                "what the key may read"
            ) from None
        raise OSError(f"{url}: {text[:400].splitlines()[0] if text else type(error).__name__}") from None
