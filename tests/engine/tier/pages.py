"""A simulated executor whose KV slots lie in memory that a disk tier can copy."""

from collections.abc import Iterator, MutableMapping

import numpy as np

from penstock.messages import Capacity, Clock
from penstock.schedule import SchedulerConfig
from tests.plan_checks import SimulatedExecutor

NOTHING = np.iinfo(np.uint64).max


class PageArray(MutableMapping[int, np.ndarray]):
    """Slots of blocks, by block. A block that was never written has no token's hash."""

    def __init__(self, blocks: int, size: int) -> None:
        self.slots = np.full((blocks, size), NOTHING, np.uint64)

    def __getitem__(self, block: int) -> np.ndarray:
        return self.slots[block]

    def __setitem__(self, block: int, content: object) -> None:
        self.slots[block] = content

    def __delitem__(self, block: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.slots)))

    def __len__(self) -> int:
        return len(self.slots)


class PagedExecutor(SimulatedExecutor):
    """See HasPages: the slots of each block are one page."""

    def __init__(self, capacity: Capacity, limits: SchedulerConfig, clock: Clock) -> None:
        super().__init__(capacity, limits, clock)
        assert self._slots is not None
        self.pages = PageArray(capacity.groups[0].num_blocks, capacity.block_size)
        self._slots._pages = [self.pages]  # type: ignore[list-item]

    def page(self, block: int) -> memoryview:
        return memoryview(self.pages.slots[block].view(np.uint8))
