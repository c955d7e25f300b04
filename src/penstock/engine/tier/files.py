"""The files of the disk tier: one for each block, checked whenever it is read.

A file is a header and the page, as between engines. It is written under another name and then renamed, so one that
was cut off is never read. Functions that run on the tier's threads return False when the disk fails; nothing else
depends on the tier.
"""

import contextlib
import os
import shutil
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

HEADER = struct.Struct("<8s32sQI12x")  # magic number, key, length of the page, checksum (CRC-32) of key and page
MAGIC = b"penstkv1"
PART = ".part"  # the end of a file's name while it is written
LOCK = "lock"  # the file in the tier's folder that its engine has locked


def page_header(key: bytes, page: memoryview) -> bytes:
    """Return what goes before a page on a disk and between engines."""
    return HEADER.pack(MAGIC, key, len(page), zlib.crc32(page, zlib.crc32(key)))


def is_page(header: bytes | bytearray, key: bytes, page: memoryview) -> bool:
    """Return whether a page is the one of this key, whole and unchanged, by the header that came with it."""
    return HEADER.unpack(header) == (MAGIC, key, len(page), zlib.crc32(page, zlib.crc32(key)))


def block_name(key: bytes) -> int:
    """Return the first 8 bytes of a key as a number. They name the file; its header has the whole key."""
    return int.from_bytes(key[:8])


class PageFiles:
    """The files of one model's blocks, in a folder of their own below the tier's folder."""

    def __init__(self, folder: Path, meaning: str, page_bytes: int) -> None:
        """`folder` is the tier's, which this process has locked. `meaning` is a text of all that pages depend on
        besides their key. Files of pages with another meaning are deleted, since they could never be read again."""
        digest = sha256(f"{MAGIC.decode()} {page_bytes} {meaning}".encode()).hexdigest()
        self.folder = folder / digest[:16]
        self.page_bytes = page_bytes
        self.file_bytes = HEADER.size + page_bytes
        for other in folder.iterdir():
            if other != self.folder and _is_name(other.name):
                shutil.rmtree(other, ignore_errors=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def scan(self) -> Iterator[tuple[int, int]]:
        """Yield the name of each block and when it was last used, in seconds since 1970. Delete files of a wrong size
        or name, which an earlier process left."""
        for entry in os.scandir(self.folder):
            try:
                facts = entry.stat(follow_symlinks=False)
            except OSError:  # it has just been deleted
                continue
            if facts.st_size == self.file_bytes and _is_name(entry.name):
                yield int(entry.name, 16), int(facts.st_mtime)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)

    # -- on the threads ---------------------------------------------------------------------------------------

    def write(self, key: bytes, page: memoryview) -> bool:
        """Write a block's file. Returns False if the disk is full or fails; nothing is left then."""
        path = self._path(block_name(key))
        header = page_header(key, page)
        try:
            file = os.open(path + PART, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                written = os.writev(file, (header, page))
            finally:
                os.close(file)
            if written == self.file_bytes:
                os.rename(path + PART, path)
                return True
        except OSError:
            pass
        with contextlib.suppress(OSError):
            os.unlink(path + PART)
        return False

    def read(self, key: bytes, page: memoryview) -> float:
        """Read a block into `page`. Returns the seconds that it took, or 0 if the file is not there or not what was
        written; then `page` has any content, and the file is deleted."""
        began = time.perf_counter()
        header = bytearray(HEADER.size)
        path = self._path(block_name(key))
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                count = os.preadv(file, (header, page), 0)
                if count == self.file_bytes and is_page(header, key, page):
                    os.utime(file)
                    return time.perf_counter() - began
            finally:
                os.close(file)
        except OSError:
            pass
        self.remove((block_name(key),))
        return 0.0

    def remove(self, names: Iterable[int]) -> bool:
        """Delete the files of blocks."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(self._path(name))
        return True

    def clear(self) -> bool:
        """Delete the files of all blocks. Returns False if some may be left."""
        shutil.rmtree(self.folder, ignore_errors=True)
        try:
            self.folder.mkdir(mode=0o700)
        except OSError:
            return False
        return True

    def _path(self, name: int) -> str:
        return f"{self.folder}/{name:016x}"


def _is_name(text: str) -> bool:
    return len(text) == 16 and not text.strip("0123456789abcdef")
