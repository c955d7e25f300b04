"""Where memory lies on a machine of several NUMA nodes."""

import ctypes
import logging
import os
import platform
from pathlib import Path

_MPOL_INTERLEAVE = 3
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # of the system calls

logger = logging.getLogger(__name__)


def interleave_memory(root: Path = Path("/")) -> tuple[int, ...]:
    """Spread what this thread, and those it starts from now on, touch first over the nodes whose processors it may use.

    The team's threads share every matrix among them as they come, so no part of it has one reader; and what one thread
    reads from disk would all lie on that thread's node, behind one memory controller. With one node nothing changes.
    Gives the nodes. A kernel that refuses leaves memory where it is touched, which is slower but right.
    """
    nodes = nodes_of(os.sched_getaffinity(0), root)
    number = _SET_MEMPOLICY.get(platform.machine())
    if len(nodes) > 1 and number is not None:
        mask = ctypes.c_ulong(sum(1 << node for node in nodes))
        bits = 8 * ctypes.sizeof(mask) + 1  # the kernel reads one less
        if ctypes.CDLL(None).syscall(number, _MPOL_INTERLEAVE, ctypes.byref(mask), ctypes.c_ulong(bits)):
            logger.warning("memory is not spread over the NUMA nodes %s: the kernel does not allow it", nodes)
    return nodes


def nodes_of(processors: set[int], root: Path = Path("/")) -> tuple[int, ...]:
    """The nodes that have any of these processors, by sysfs below `root`; none where it does not say."""
    nodes = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        if processors & processor_list((folder / "cpulist").read_text()):
            nodes.append(int(folder.name[len("node") :]))
    return tuple(sorted(nodes))


def processor_list(text: str) -> set[int]:
    """Of sysfs: "0-3,8" is {0, 1, 2, 3, 8}."""
    processors: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            processors |= set(range(int(first), int(last or first) + 1))
    return processors
