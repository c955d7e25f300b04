"""Which blocks a disk has, and when each was last used, in 12 bytes a block."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

RECENT = 1024  # names that are kept beside the sorted array, until they are merged into it


class DiskIndex:
    """A set of 64-bit names, each with the second of its last use.

    Most names are in a sorted array, a few new ones in a dict: merging these takes a pass over the array.
    """

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        """`entries`: names, and seconds since 1970. A second is 1 or more."""
        found = np.fromiter(entries, [("name", np.uint64), ("used", np.uint32)])
        found.sort(order="name")
        self._names: NDArray[np.uint64] = found["name"].copy()
        self._used: NDArray[np.uint32] = found["used"].copy()  # 0: removed
        self._recent: dict[int, int] = {}
        self._count = len(found)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, name: int) -> bool:
        return name in self._recent or self._place(name) is not None

    def leading(self, names: Sequence[int]) -> int:
        """Return how many of `names` are there before the first that is not."""
        wanted = np.array(names, np.uint64)
        places = np.searchsorted(self._names, wanted)
        places[places == len(self._names)] = 0
        found = (self._names[places] == wanted) & (self._used[places] > 0) if len(self._names) else wanted < 0
        for i in np.flatnonzero(~found).tolist():
            if names[i] not in self._recent:
                return i
        return len(names)

    def add(self, name: int, used: int) -> None:
        """Add a name, or note that it was used."""
        place = self._place(name)
        if place is not None:
            self._used[place] = used
            return
        self._count += name not in self._recent
        self._recent[name] = used
        if len(self._recent) > RECENT:
            self._merge()

    def remove(self, name: int) -> None:
        """Remove a name. No effect if it is not there."""
        place = self._place(name)
        if place is not None:
            self._used[place] = 0
            self._count -= 1
        elif self._recent.pop(name, None) is not None:
            self._count -= 1

    def clear(self) -> None:
        """Remove all names."""
        self._names, self._used = self._names[:0], self._used[:0]
        self._recent.clear()
        self._count = 0

    def take_oldest(self, count: int) -> list[int]:
        """Remove the names that were not used for longest, at most `count`, and return them."""
        self._merge()
        count = max(min(count, self._count), 0)
        if not count:
            return []
        return self._take(np.argpartition(self._used, count - 1)[:count])

    def take_unused_since(self, second: int) -> list[int]:
        """Remove the names that were last used before `second`, and return them."""
        self._merge()
        return self._take(np.flatnonzero(self._used < second))

    def _take(self, places: NDArray[np.intp]) -> list[int]:
        names: list[int] = self._names[places].tolist()
        self._used[places] = 0
        self._count -= len(names)
        return names

    def _place(self, name: int) -> int | None:
        """Return the place of a name in the sorted array, None if it is not there."""
        place = int(np.searchsorted(self._names, np.uint64(name)))
        if place < len(self._names) and self._names[place] == name and self._used[place]:
            return place
        return None

    def _merge(self) -> None:
        """Sort the recent names into the array, and drop the removed ones."""
        if self._count < len(self._names) + len(self._recent):
            kept = self._used > 0
            self._names, self._used = self._names[kept], self._used[kept]
        names = np.array(sorted(self._recent), np.uint64)
        used = np.array([self._recent[name] for name in names.tolist()], np.uint32)
        places = np.searchsorted(self._names, names)
        self._names = np.insert(self._names, places, names)
        self._used = np.insert(self._used, places, used)
        self._recent.clear()
