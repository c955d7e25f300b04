"""What a hub says about a revision of a model. Nothing in it is believed that becomes a path or a size of memory."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from penstock.weights.gguf_choice import HubError

TIMEOUT = 10.0  # seconds for each part of the hub's answer
WHOLE_SECONDS = 60.0  # for all of it
MAX_BYTES = 32 << 20  # of it
TICK = 0.2  # seconds between two checks whether it is still wanted

_COMMIT = re.compile("[0-9a-f]{40}")
_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_PART = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")
T = TypeVar("T")


class ListedFile(NamedTuple):
    """A file of a revision."""

    name: str
    size: int  # bytes
    digest: str  # the SHA-256 of a file in large file storage, else the SHA-1 of its git blob
    large: bool  # in large file storage
    git_blob: str  # what git has of it: for a large one, a pointer


class Listing(NamedTuple):
    commit: str
    files: list[ListedFile]

    def named(self, wanted: Callable[[str], bool]) -> list[ListedFile]:
        return [file for file in self.files if wanted(file.name)]


def read_listing(endpoint: str, name: str, revision: str | None, headers: dict[str, str]) -> Listing:
    """Asks a hub for a revision. Raises HubError for an answer that cannot be right, and huggingface_hub's errors."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    path = f"{endpoint}/api/models/{name}"
    if revision is not None:
        path += f"/revision/{quote(revision, safe='')}"
    body = bytearray()
    with get_session().stream("GET", path, headers=headers, params={"blobs": "true"}, timeout=TIMEOUT) as response:
        if response.status_code >= 300:
            response.read()
        hf_raise_for_status(response)
        for part in response.iter_bytes(1 << 16):
            body += part
            if len(body) > MAX_BYTES:
                raise HubError(f"the hub's list of the files of {name} has more than {MAX_BYTES} bytes, the limit")
    try:
        return _parse(name, json.loads(body))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"the hub's answer about {name} cannot be read: {error}") from None


def _parse(name: str, info: dict[str, Any]) -> Listing:
    commit = info.get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise HubError(f"the hub names the commit {str(commit)[:80]!r} of {name}; a commit is 40 hexadecimal digits")
    return Listing(commit, [_parse_file(entry) for entry in info.get("siblings") or ()])


def _parse_file(entry: dict[str, Any]) -> ListedFile:
    stored = entry.get("lfs")
    digest = entry.get("blobId") if stored is None else stored.get("sha256")
    size = entry.get("size") if stored is None else stored.get("size", entry.get("size"))
    name, known = str(entry["rfilename"]), size if isinstance(size, int) else -1
    return ListedFile(name, known, str(digest), stored is not None, str(entry.get("blobId")))


def check_name(model: str, file: ListedFile) -> None:
    """Raises HubError unless a file's name is a path below its folder."""
    path = PurePosixPath(file.name)
    if not all(_PART.fullmatch(part) and part not in (".", "..") for part in path.parts) or str(path) != file.name:
        raise HubError(f"the hub lists {file.name[:80]!r} among the files of {model}, which is not a name of a file")


def check_content(model: str, file: ListedFile) -> None:
    """Raises HubError unless a file's size and its digest are known."""
    if file.size < 0 or not _DIGEST.fullmatch(file.digest) or (len(file.digest) == 64) != file.large:
        raise HubError(
            f"the hub states neither size nor digest of {file.name} of {model} (size {file.size}, digest "
            f"{file.digest[:80]!r}): what it sends could not be checked"
        )


def interruptible(work: Callable[[], T], check: Callable[[], None], seconds: float = WHOLE_SECONDS) -> T:
    """Returns what `work` returns, or raises what it raises. It runs on a daemon thread.

    `check` is called several times a second. If it raises, or after `seconds`, the thread is left to end by itself: a
    hub that sends a byte now and then could hold it for ever. Raises TimeoutError.
    """
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="hub", daemon=True)
    thread.start()
    for _ in range(round(seconds / TICK)):
        thread.join(TICK)
        if not thread.is_alive():
            break
        check()
    else:
        raise TimeoutError(f"no whole answer came within {seconds:g} s")
    if errors:
        raise errors[0]
    return result[0]
