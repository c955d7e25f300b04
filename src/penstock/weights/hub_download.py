"""Downloads the files of a model into Hugging Face's cache. A later run continues where an earlier one stopped.

huggingface_hub continues a file only while its process lives: it writes to a temporary file that no other process
finds. It also believes what a hub says of a file while it sends it. Here the bytes so far are in
`blobs/DIGEST.incomplete`, which has a lock, so several processes share a download. A complete file with the digest that
was listed becomes `blobs/DIGEST`.
"""

import fcntl
import hashlib
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

CONNECTIONS = 4  # files that are downloaded at the same time
TICK = 0.2  # seconds between two reports
POLL = 0.5  # seconds between two attempts to lock a file that another process downloads

Report = Callable[[int], None]  # called with the bytes that all files have so far


class Damaged(Exception):
    """A file has not the size or the digest that the hub states. Its name is the message."""


@dataclass(frozen=True)
class HubFile:
    """A file on the hub, and its place in the cache."""

    name: str
    size: int
    digest: str  # SHA-256, or the SHA-1 of a git blob
    url: str
    blob: Path

    @property
    def partial(self) -> Path:
        return self.blob.with_name(f"{self.digest}.incomplete")

    def is_intact(self, stream: BufferedRandom) -> bool:
        """Returns whether a stream, which is at its begin, has the digest."""
        if len(self.digest) == 64:
            return hashlib.file_digest(stream, "sha256").hexdigest() == self.digest
        git = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        return hashlib.file_digest(stream, lambda: git).hexdigest() == self.digest

    def present(self) -> int:
        """Returns the bytes that are in the cache."""
        if self.blob.exists():
            return self.size
        try:
            return min(self.partial.stat().st_size, self.size)
        except FileNotFoundError:
            return 0


class Download:
    """Downloads files, several at a time. `headers` authorise the requests."""

    def __init__(self, files: Sequence[HubFile], headers: Mapping[str, str]) -> None:
        self._files = files
        self._headers = {**headers, "Accept-Encoding": "identity"}
        self._present = {file.name: file.present() for file in files}
        self._waiting: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, report: Report) -> None:
        """Returns when all files are in the cache. Raises Damaged, OSError or an error of huggingface_hub's library for
        HTTP.

        The threads are daemons: Ctrl-C ends the process at once, not after the chunk that a thread waits for.
        """
        for file in self._files:
            self._waiting.put(file)
        count = min(CONNECTIONS, len(self._files))
        threads = [threading.Thread(target=self._work, name=f"download-{i}", daemon=True) for i in range(count)]
        for thread in threads:
            thread.start()
        try:
            while (alive := [thread for thread in threads if thread.is_alive()]) and not self._errors:
                alive[0].join(TICK)
                report(sum(self._present.values()))
        finally:
            self._stopped.set()
        if self._errors:
            raise self._errors[0]
        report(sum(self._present.values()))  # small files may be complete before the first report

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                self._fetch(self._waiting.get_nowait())
        except queue.Empty:
            pass
        except BaseException as error:  # raised again in `run`
            self._errors.append(error)

    def _fetch(self, file: HubFile) -> None:
        from huggingface_hub.file_download import http_get

        file.blob.parent.mkdir(parents=True, exist_ok=True)
        stream = self._lock(file)
        if stream is None:
            return
        with stream:
            start = stream.seek(0, os.SEEK_END)
            if start > file.size:
                start = stream.seek(0)
                stream.truncate()
            # As much of a file as http_get needs.
            part: Any = _BoundedStream(stream, file, lambda size: self._advance(file, size))
            try:
                http_get(file.url, part, resume_size=start, headers=self._headers, expected_size=file.size)
                stream.seek(0)
                if not file.is_intact(stream):
                    raise Damaged(file.name)
            except Damaged:
                file.partial.unlink(missing_ok=True)
                raise
            file.partial.replace(file.blob)

    def _lock(self, file: HubFile) -> BufferedRandom | None:
        """Returns the partial file, open and locked, or None if another process has completed it in the meantime."""
        while not file.blob.exists():
            stream = os.fdopen(os.open(file.partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # The process that had the lock may have moved or removed the file since it was opened here.
                if file.partial.exists() and os.path.samestat(os.fstat(stream.fileno()), file.partial.stat()):
                    return stream
                stream.close()
            except BlockingIOError:
                stream.close()
                self._advance(file, file.present())
                self._stopped.wait(POLL)
            except BaseException:
                stream.close()
                raise
        self._advance(file, file.size)
        return None

    def _advance(self, file: HubFile, size: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError(f"the download of {file.name} was stopped")
        self._present[file.name] = size


class _BoundedStream:
    """The stream that huggingface_hub writes to. It reports the size after each chunk, and takes no more than the
    file's size."""

    def __init__(self, stream: BufferedRandom, file: HubFile, report: Report) -> None:
        self._stream = stream
        self._file = file
        self._report = report

    def write(self, data: bytes) -> int:
        if self._stream.tell() + len(data) > self._file.size:
            raise Damaged(self._file.name)
        count = self._stream.write(data)
        self._stream.flush()  # what is in the file survives the process
        self._report(self._stream.tell())
        return count

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        return self._stream.truncate(size)

    def flush(self) -> None:
        self._stream.flush()
