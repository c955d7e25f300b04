"""Measures the machine from a process whose main thread the native kernels have pinned."""

from collections.abc import Callable

import torch

from penstock.bench.roofline import MachineProbe, MachineRates
from penstock.engine.processors import running_on


def probing(probe: MachineProbe, cpus: set[int]) -> Callable[[], MachineRates]:
    """Returns a function that measures with one torch thread for each processor. A runner leaves torch only one."""

    def measured() -> MachineRates:
        threads = torch.get_num_threads()
        with running_on(cpus):
            torch.set_num_threads(len(cpus))
            found = probe()
            torch.set_num_threads(threads)
        return found

    return measured
