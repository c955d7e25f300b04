"""Interleaves memory over the NUMA nodes of a machine."""

import ctypes
import logging
import os
import platform
from pathlib import Path

_MPOL_INTERLEAVE = 3
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # system call numbers

logger = logging.getLogger(__name__)


def interleave_memory(root: Path = Path("/")) -> tuple[int, ...]:
    """Interleaves new memory over all NUMA nodes whose processors this thread may use, and returns these nodes.

    The policy holds for pages that this thread, and threads it starts later, touch first. Without it, weights that one
    thread reads would all be on that thread's node, behind one memory controller, while all threads of the team read
    every matrix. With one node nothing changes. If the kernel refuses, a warning is logged and memory stays local,
    which is only slower.
    """
    nodes = nodes_of(os.sched_getaffinity(0), root)
    number = _SET_MEMPOLICY.get(platform.machine())
    if len(nodes) > 1 and number is not None:
        mask = ctypes.c_ulong(sum(1 << node for node in nodes))
        bits = 8 * ctypes.sizeof(mask) + 1  # the kernel reads one bit less
        if ctypes.CDLL(None).syscall(number, _MPOL_INTERLEAVE, ctypes.byref(mask), ctypes.c_ulong(bits)):
            logger.warning("memory is not interleaved over the NUMA nodes %s: the kernel refused set_mempolicy", nodes)
    return nodes


def nodes_of(processors: set[int], root: Path = Path("/")) -> tuple[int, ...]:
    """The NUMA nodes of these processors, from sysfs below `root`; empty when sysfs lists none."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if processors & processor_list((folder / "cpulist").read_text()):
            nodes.append(int(folder.name[len("node") :]))
    return tuple(sorted(nodes))


def processor_list(text: str) -> set[int]:
    """Parses a CPU list of sysfs: "0-3,8" gives {0, 1, 2, 3, 8}."""
    processors: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            processors |= set(range(int(first), int(last or first) + 1))
    return processors
