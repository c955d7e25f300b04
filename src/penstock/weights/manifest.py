"""SHA-256 sums of a model's files: a file SHA256SUMS beside them, as `sha256sum` writes it. It is checked at each load.

It finds files that were damaged, exchanged or only partly copied. It is no signature: a user who can write it can also
write the weights.
"""

import hashlib
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config import format_bytes
from penstock.families.checkpoint.stored import CheckpointError
from penstock.gguf import is_gguf
from penstock.weights.checkpoint import stored_tensors
from penstock.weights.files import model_files

NAME = "SHA256SUMS"
MAX_BYTES = 1 << 20  # of the manifest
THREADS = 4  # files that are read at a time
PIECE_BYTES = 1 << 20  # read at a time: small enough to be still in the processor's cache when it is hashed
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?([^/\\]+)")
_BLOB = re.compile(r"[0-9a-f]{64}")  # how the hub's cache names a large file: by its SHA-256


def manifest_path(model: Path) -> Path:
    """Returns the path of a model's manifest, if it has one."""
    return (model.parent if is_gguf(model) else model) / NAME


def read_manifest(model: Path) -> dict[Path, str] | None:
    """The SHA-256 of each file of a model that its manifest lists; None without a manifest. Lines about other files do
    not count.

    Raises CheckpointError for a manifest that cannot be read, or that lacks a file with weights.
    """
    path = manifest_path(model)
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
        raise CheckpointError(f"{path} is no file of at most {MAX_BYTES >> 20} MiB; write it again: penstock manifest")
    listed = _parse(path)
    sums = {file: listed[file.name] for file in model_files(model) if file.name in listed}
    for file in sorted({tensor.path for tensor in stored_tensors(model).values()}):
        if file not in sums:
            raise CheckpointError(
                f"{path} does not list {file.name}, which has weights; write it again if that file is right: "
                f"penstock manifest {model}"
            )
    return sums


def _parse(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path} is not UTF-8 text; write it again: penstock manifest") from None
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            if "/" in line or not line.strip() or line.startswith("#"):
                continue  # of a file in another folder, or a comment
            raise CheckpointError(
                f"{path}, line {number}: {line[:80]!r} is not a SHA-256, two spaces and a file's name, as sha256sum "
                "writes it"
            )
        if found.setdefault(match[2], match[1].lower()) != match[1].lower():
            raise CheckpointError(f"{path}, line {number}: {match[2]} is there twice, with different sums")
    return found


def write_manifest(model: Path, advance: Callable[[int], None]) -> Mapping[Path, str]:
    """Writes the manifest of a model, and returns what it lists. `advance` is called with the number of bytes read
    since its last call. Raises CheckpointError for a file that is not the one that the hub has, and OSError."""
    files = [file for file in model_files(model) if file.name != NAME]
    sums = Sums(files, advance).wait()
    for file, digest in sums.items():
        blob = file.resolve().name
        if _BLOB.fullmatch(blob) and blob != digest:
            raise CheckpointError(_wrong(file, blob, digest))
    path = manifest_path(model)
    others = {} if not path.exists() or not is_gguf(model) else _parse(path)  # of models beside this file
    lines = {**others, **{file.name: digest for file, digest in sums.items()}}
    temporary = path.with_suffix(".new")
    temporary.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(lines.items())))
    temporary.replace(path)
    return sums


@dataclass(frozen=True)
class Verified:
    """The result of a check that found no damage."""

    files: int
    bytes: int
    seconds: float

    def __str__(self) -> str:
        count = f"{self.files} file{'s' if self.files > 1 else ''}"
        return f"{count}, {format_bytes(self.bytes)}, have the SHA-256 of {NAME} (read in {self.seconds:.1f} s)"


class ManifestCheck:
    """Compares a model's files with its manifest, on threads. It reads nothing if there is no manifest."""

    def __init__(self, model: Path, advance: Callable[[int], None] = lambda count: None) -> None:
        """Starts. Raises CheckpointError as `read_manifest` does."""
        self._began = time.perf_counter()
        self._wanted = read_manifest(model) or {}
        self._sums = Sums(self._wanted, advance) if self._wanted else None

    def result(self) -> Verified | None:
        """Blocks until the files are read; None without a manifest. Raises CheckpointError for a file that differs, and
        OSError."""
        if self._sums is None:
            return None
        found = self._sums.wait()
        for file, digest in self._wanted.items():
            if found[file] != digest:
                raise CheckpointError(_wrong(file, digest, found[file]))
        return Verified(len(found), self._sums.bytes, time.perf_counter() - self._began)

    def cancel(self) -> None:
        """Stops reading. `result` must not be called then."""
        if self._sums is not None:
            self._sums.cancel()


class Sums:
    """Computes the SHA-256 of files on threads, which do not keep the process alive."""

    def __init__(self, files: Iterable[Path], advance: Callable[[int], None]) -> None:
        self._todo = sorted(files, key=lambda file: file.stat().st_size)  # the largest last: they are taken first
        self._found: dict[Path, str] = {}
        self._error: Exception | None = None
        self._advance = advance
        self._cancelled = False
        self.bytes = sum(file.stat().st_size for file in self._todo)
        count = min(THREADS, len(self._todo))
        self._threads = [threading.Thread(target=self._run, name="sums", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> Mapping[Path, str]:
        """The sums by file. Raises OSError."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> None:
        try:
            while True:
                try:
                    file = self._todo.pop()  # not `while self._todo`: another thread may take the last
                except IndexError:
                    return
                self._found[file] = self._sum(file)
        except Exception as error:
            self._error = error

    def _sum(self, path: Path) -> str:
        digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE_BYTES))
        with path.open("rb", buffering=0) as file:
            while not self._cancelled and (count := file.readinto(piece)):
                digest.update(piece[:count])
                self._advance(count)
        return digest.hexdigest()


def _wrong(file: Path, expected: str, found: str) -> str:
    return (
        f"{file} has the SHA-256 {found}, but {expected} is expected: the file is damaged or another one; copy it again"
    )
