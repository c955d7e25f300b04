"""Pages of a device's memory, on their way to the host's memory or to a disk, and back.

What `HasPages.page` returns for them has the methods of runtime's DevicePage. They run on the tier's threads.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.config.sizes import format_bytes
from penstock.engine.tier.files import PageFiles, block_name

CHUNK = 64 << 20  # bytes that are allocated at once: CUDA rounds up to a power of two


class HostPages:
    """Pages in the host's memory, in the place of PageFiles. Only the thread that writes changes them."""

    folder = "the host's memory"

    def __init__(self, allocate: Callable[[int], memoryview], page_bytes: int, most_bytes: int) -> None:
        """All memory is taken here: to pin some later would make steps wait. Raises ValueError if there is too
        little."""
        self.page_bytes = self.file_bytes = page_bytes
        self._pages: dict[int, tuple[bytes, memoryview]] = {}  # with the whole key, by block name
        self._free: list[memoryview] = []
        left = most_bytes // page_bytes
        try:
            while left:
                count = min(max(CHUNK // page_bytes, 1), left)
                chunk, left = allocate(count * page_bytes), left - count
                self._free += [chunk[place * page_bytes : (place + 1) * page_bytes] for place in range(count)]
        except (RuntimeError, MemoryError):
            pinned = format_bytes(len(self._free) * page_bytes)
            raise ValueError(
                f"--kv-host is {format_bytes(most_bytes)}, and only {pinned} could be pinned: give a smaller size"
            ) from None

    def scan(self) -> Iterable[tuple[int, int]]:
        return ()

    def write(self, key: bytes, page: Any) -> bool:
        self.remove((block_name(key),))
        if not self._free:
            return False
        page.save(slot := self._free.pop())
        self._pages[block_name(key)] = key, slot
        return True

    def read(self, key: bytes, page: Any) -> float:
        """See PageFiles. A page that was removed meanwhile may have been overwritten: it is not there."""
        began = time.perf_counter()
        found = self._pages.get(block_name(key))
        if found is None or found[0] != key:
            return 0.0
        page.load(found[1])
        return time.perf_counter() - began if self._pages.get(block_name(key)) is found else 0.0

    def remove(self, names: Iterable[int]) -> bool:
        self._free += [found[1] for name in names if (found := self._pages.pop(name, None)) is not None]
        return True

    def clear(self) -> bool:
        return self.remove(list(self._pages))


class StagedFiles:
    """PageFiles whose pages go through the host's memory. All else is as of the files."""

    def __init__(self, files: PageFiles, allocate: Callable[[int], memoryview]) -> None:
        self._files, self._down, self._up = files, allocate(files.page_bytes), allocate(files.page_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def write(self, key: bytes, page: Any) -> bool:
        page.save(self._down)
        return self._files.write(key, self._down)

    def read(self, key: bytes, page: Any) -> float:
        began = time.perf_counter()
        if not self._files.read(key, self._up):
            return 0.0
        page.load(self._up)
        return time.perf_counter() - began
