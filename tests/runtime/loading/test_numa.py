"""Memory is interleaved over the NUMA nodes whose processors compute, and over no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.loading.numa import nodes_of, processor_list

# In a process of its own, as a thread's policy cannot be seen to be undone. Node 0 alone would need no spreading: sysfs
# says here that there is another, without memory, which the kernel passes over.
PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from penstock.runtime.loading import numa
nodes = numa.interleave_memory(Path(sys.argv[1]))
memory = np.ones(64 << 20, np.uint8)
start = f"{memory.ctypes.data & ~0xFFF:x}"
print(nodes, *[line for line in Path("/proc/self/numa_maps").read_text().splitlines() if line.startswith(start[:-2])])
"""


def sysfs(root: Path, **nodes: str) -> Path:
    for name, processors in nodes.items():
        folder = root / "sys/devices/system/node" / name
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{processors}\n")
    return root


@pytest.mark.parametrize(
    ("text", "processors"), [("0-3,8", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("0,2-3", {0, 2, 3})]
)
def test_a_list_of_processors(text: str, processors: set[int]) -> None:
    assert processor_list(text) == processors


def test_nodes_are_those_whose_processors_may_be_used(tmp_path: Path) -> None:
    root = sysfs(tmp_path, node0="0-3", node1="4-7", node2="8-11", node10="")
    assert nodes_of({2, 9}, root) == (0, 2)
    assert nodes_of({5}, root) == (1,)


def test_nothing_is_said_of_a_machine_without_sysfs(tmp_path: Path) -> None:
    assert nodes_of({0, 1}, tmp_path) == ()


def test_the_kernel_interleaves(tmp_path: Path) -> None:
    every = ",".join(map(str, os.sched_getaffinity(0)))
    root = sysfs(tmp_path, node0=every, node1=every)
    done = subprocess.run([sys.executable, "-c", PROGRAM, root], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(0, 1)")
    if Path("/proc/self/numa_maps").exists():
        assert "interleave" in done.stdout, done.stdout + done.stderr
