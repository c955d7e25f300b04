"""Measures the machine from a process whose main thread the native kernels have pinned."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.bench.roofline import MachineProbe, MachineRates


@contextmanager
def unpinned(cpus: set[int]) -> Iterator[None]:
    """Lets this thread run on `cpus` during the block. Native kernels pin the thread that starts them."""
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)


def probing(probe: MachineProbe, cpus: set[int]) -> Callable[[], MachineRates]:
    """Returns a function that measures with one torch thread for each processor. A runner leaves torch only one."""

    def measured() -> MachineRates:
        threads = torch.get_num_threads()
        with unpinned(cpus):
            torch.set_num_threads(len(cpus))
            found = probe()
            torch.set_num_threads(threads)
        return found

    return measured
