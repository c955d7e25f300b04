"""The file with the prompts of earlier sessions, for the Up key. Only its owner can read it."""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from penstock.config.state import state_home

MAX_ENTRIES = 1000
MAX_BYTES = 1 << 20  # read at a start, and kept
MAX_ENTRY_BYTES = 64 << 10  # a longer prompt is not kept


def history_path(environ: Mapping[str, str]) -> Path:
    """Returns the file, in the folder for state of the XDG base directories."""
    return state_home(environ) / "penstock" / "run_history"


class HistoryFile:
    """Prompts, one JSON string a line, oldest first. A file that cannot be read or written counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[str]:
        """Returns at most the last `MAX_ENTRIES` prompts."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - MAX_BYTES))
                lines = file.read(MAX_BYTES).splitlines()
        except OSError:
            return []
        if size > MAX_BYTES:
            lines = lines[1:]  # the first one is cut
        entries = []
        for line in lines[-MAX_ENTRIES:]:
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, str):
                    entries.append(entry)
        return entries

    def append(self, prompt: str) -> None:
        """Adds a prompt, and drops the oldest ones if the file has become too long."""
        line = json.dumps(prompt).encode() + b"\n"
        if len(line) > MAX_ENTRY_BYTES:
            return
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(handle, "wb", buffering=0) as file:
                os.fchmod(handle, 0o600)  # it may be older than this program
                file.write(line)  # at once: another session may append, too
                size = os.fstat(handle).st_size
            if size > 2 * MAX_BYTES:
                self._shorten()

    def _shorten(self) -> None:
        entries = self.load()
        handle, name = tempfile.mkstemp(prefix=".run_history-", dir=self._path.parent)
        try:
            with open(handle, "w") as file:
                file.writelines(json.dumps(entry) + "\n" for entry in entries)
            os.replace(name, self._path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
