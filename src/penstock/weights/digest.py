"""The digest of a model's weights. It covers every byte, so machines can compare models by it."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from penstock.config.state import cache_home
from penstock.weights.checkpoint import stored_tensors
from penstock.weights.manifest import Sums

REMEMBERED_BYTES = 64 << 20  # the size from which a file's sum is remembered; a smaller file is read in 50 ms
MOST_REMEMBERED = 1000  # files; the oldest entries are dropped
# The sum of a file that has changed in the last seconds is not remembered: it could change again within a tick of the
# file system's clock, and keep its times.
SETTLED_SECONDS = 2.0

# A file's inode, size, mtime and ctime in ns. A file whose state is the same has not changed.
_State = tuple[int, int, int, int]


class WeightsDigest:
    """Computes the digest on threads while the model is loaded. The SHA-256 sums of large files are remembered, so that
    a file that has not changed is not read again."""

    def __init__(self, model: Path, memory: Path | None = None) -> None:
        """Starts to read. `memory` is the file with remembered sums; None: the one in the user's cache folder. Raises
        the errors of `stored_tensors`."""
        self._memory = memory or cache_home(os.environ) / "penstock" / "sha256.json"
        files = sorted({tensor.path.resolve() for tensor in stored_tensors(model).values()})
        self._states = {file: _state(file) for file in files}
        known = _read(self._memory)
        self._known = {file: sums for file in files if (sums := _known_sum(known, file, self._states[file]))}
        self._sums = Sums([file for file in files if file not in self._known], lambda count: None)

    def result(self) -> str:
        """Returns the digest as hexadecimal digits: the SHA-256 of the sorted SHA-256 sums of all files. Blocks until
        the files are read. Raises OSError."""
        found = self._sums.wait()
        with suppress(OSError):  # if the folder cannot be written, the next start reads the files again
            self._remember(found)
        return sha256("".join(sorted([*self._known.values(), *found.values()])).encode()).hexdigest()

    def _remember(self, found: Mapping[Path, str]) -> None:
        """Writes the sums of large files that have not changed while they were read."""
        settled = time.time() - SETTLED_SECONDS
        new = {
            str(file): [*state, digest]
            for file, digest in found.items()
            if (state := self._states[file])[1] >= REMEMBERED_BYTES
            and max(state[2:]) < settled * 1e9
            and _state(file) == state
        }
        if not new:
            return
        kept = {file: entry for file, entry in _read(self._memory).items() if file not in new}
        entries = list((kept | new).items())[-MOST_REMEMBERED:]
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._memory.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(dict(entries), indent=1))
        temporary.replace(self._memory)


def _state(file: Path) -> _State:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _known_sum(known: dict[str, list[object]], file: Path, state: _State) -> str:
    """Returns the remembered SHA-256 of a file in this state, or ""."""
    entry = known.get(str(file))
    return str(entry[-1]) if entry is not None and entry[:-1] == list(state) else ""


def _read(memory: Path) -> dict[str, list[object]]:
    """Returns the remembered entries: path -> [*state, sum]. Returns none if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        entries = json.loads(memory.read_text())
        if isinstance(entries, dict) and all(isinstance(entry, list) and entry for entry in entries.values()):
            return entries
    return {}
