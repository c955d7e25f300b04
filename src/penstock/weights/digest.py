"""The digest of a model's weights: of all their bytes, since models are told apart by it between machines."""

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

REMEMBERED_BYTES = 64 << 20  # of the smallest file whose sum is remembered: a smaller one is read in 50 ms
MOST_REMEMBERED = 1000  # files; the sums found longest ago are forgotten
SETTLED_SECONDS = 2.0  # since a file's last change: one that changes again within a tick of the clock looks the same

# A file's inode, size, and times of its last change and of the last change of its inode, in ns.
_State = tuple[int, int, int, int]


class WeightsDigest:
    """Computes the digest on threads while the model is loaded. Files that were read before, and have not changed
    since, are not read."""

    def __init__(self, model: Path, memory: Path | None = None) -> None:
        """Starts. `memory` is the file of sums that are known; None: the user's. Raises what `stored_tensors` does."""
        self._memory = memory or cache_home(os.environ) / "penstock" / "sha256.json"
        files = sorted({tensor.path.resolve() for tensor in stored_tensors(model).values()})
        self._states = {file: _state(file) for file in files}
        known = _read(self._memory)
        self._known = {file: sums for file in files if (sums := _known_sum(known, file, self._states[file]))}
        self._sums = Sums([file for file in files if file not in self._known], lambda count: None)

    def result(self) -> str:
        """The digest, as hexadecimal digits: of the SHA-256 of each file, in order of these. Blocks until the files are
        read. Raises OSError."""
        found = self._sums.wait()
        with suppress(OSError):  # a folder that cannot be written only costs time
            self._remember(found)
        return sha256("".join(sorted([*self._known.values(), *found.values()])).encode()).hexdigest()

    def _remember(self, found: Mapping[Path, str]) -> None:
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
        entries = list((_read(self._memory) | new).items())[-MOST_REMEMBERED:]
        self._memory.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._memory.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(dict(entries), indent=1))
        temporary.replace(self._memory)


def _state(file: Path) -> _State:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _known_sum(known: dict[str, list[object]], file: Path, state: _State) -> str:
    """The remembered SHA-256 of a file in this state, or ""."""
    entry = known.get(str(file))
    return str(entry[-1]) if entry is not None and entry[:-1] == list(state) else ""


def _read(memory: Path) -> dict[str, list[object]]:
    """What is remembered; nothing if the file is not there or damaged."""
    with suppress(OSError, ValueError):
        entries = json.loads(memory.read_text())
        if isinstance(entries, dict) and all(isinstance(entry, list) and entry for entry in entries.values()):
            return entries
    return {}
