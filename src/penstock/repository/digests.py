"""The digest of a folder: what a version of a model is."""

import hashlib
from pathlib import Path
from typing import Any

from penstock.repository.settings import SettingsError

MAX_FILES = 10_000  # of a version
MAX_DIGESTS = 100_000  # of files that are remembered


class FolderDigests:
    """Computes digests of folders. Files that have not changed since they were read are not read again."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, str]] = {}  # of files: what changes with their content, and the digest

    def of(self, folder: Path) -> tuple[str, int]:
        """Returns the SHA-256 of the names and contents of all files, and their bytes. Raises SettingsError for too
        many files, and OSError."""
        if len(self._known) > MAX_DIGESTS:
            self._known.clear()
        digest, total = hashlib.sha256(), 0
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        if len(paths) > MAX_FILES:
            raise SettingsError(f"a version has {len(paths)} files; the limit is {MAX_FILES}")
        for path in paths:
            state = path.stat()
            now = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            before, found = self._known.get(str(path), (None, ""))
            if before != now:
                with path.open("rb") as file:
                    found = hashlib.file_digest(file, "sha256").hexdigest()
                self._known[str(path)] = now, found
            digest.update(f"{path.relative_to(folder)}\0{found}\n".encode())
            total += state.st_size
        return digest.hexdigest(), total
