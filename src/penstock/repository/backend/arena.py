"""Memory that a process shares with a child, divided into regions."""

import bisect
import mmap
import os

ALIGNMENT = 64  # bytes, of every region: a cache line


class TensorArena:
    """A file in memory. The parent divides it; the child maps it by its descriptor. Pages that were never written take
    no memory."""

    def __init__(self, size: int) -> None:
        """Raises OSError."""
        self.size = size
        self.fd = os.memfd_create("penstock-tensors", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.view = memoryview(mmap.mmap(self.fd, size))
        self._free = [(0, size)]  # (start, end) of each gap, in order
        self._taken: dict[int, int] = {}  # end of each region, by start

    def take(self, size: int) -> int | None:
        """Returns the start of a new region, or None if no gap is large enough."""
        size = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        for place, (start, end) in enumerate(self._free):
            if end - start >= size:
                if end - start == size:
                    del self._free[place]
                else:
                    self._free[place] = (start + size, end)
                self._taken[start] = start + size
                return start
        return None

    def give(self, start: int) -> None:
        """Frees a region."""
        end = self._taken.pop(start)
        place = bisect.bisect(self._free, (start, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == start:
            place -= 1
            start = self._free.pop(place)[0]
        self._free.insert(place, (start, end))

    @property
    def used(self) -> int:
        """The bytes of all regions."""
        return sum(end - start for start, end in self._taken.items())

    def close(self) -> None:
        """Closes the file. The memory is freed when no view of it is left."""
        os.close(self.fd)
