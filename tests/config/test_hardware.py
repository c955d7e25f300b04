"""What the machine gives is read from texts of real machines, and from a made-up root."""

import os
from pathlib import Path

import pytest

from penstock.config.machine.hardware import (
    cgroup_folders,
    cpu_quota,
    detect_hardware,
    memory_limit,
    parse_meminfo,
)

MEMINFO = """\
MemTotal:       24684096 kB
MemFree:        15394212 kB
MemAvailable:   20664180 kB
HugePages_Total:       0
Hugepagesize:       2048 kB
"""


def test_meminfo_is_in_kibibytes() -> None:
    assert parse_meminfo(MEMINFO) == (24684096 * 1024, 20664180 * 1024)


def test_a_meminfo_without_figures_is_an_error() -> None:
    with pytest.raises(ValueError, match="MemAvailable"):
        parse_meminfo("MemTotal: 5 kB\n")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine without cgroups."""
    write(tmp_path, "proc/meminfo", MEMINFO)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_cgroups_the_machine_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5})
    found = detect_hardware(root)
    assert (found.cores, found.memory_total) == (3, 24684096 * 1024)


def test_version_2_limits_of_a_parent_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    write(root, "proc/self/cgroup", "0::/system.slice/app.service\n")
    write(root, "sys/fs/cgroup/system.slice/memory.max", f"{8 << 30}\n")
    write(root, "sys/fs/cgroup/system.slice/memory.current", f"{3 << 30}\n")
    write(root, "sys/fs/cgroup/system.slice/memory.stat", f"anon 5\ninactive_file {1 << 30}\n")
    write(root, "sys/fs/cgroup/system.slice/app.service/memory.max", "max\n")
    write(root, "sys/fs/cgroup/system.slice/app.service/cpu.max", "250000 100000\n")
    found = detect_hardware(root)
    assert (found.cores, found.memory_total, found.memory_available) == (2, 8 << 30, 6 << 30)


def test_version_1_limits_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    write(root, "proc/self/cgroup", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n")
    # In the container the mount begins at its own cgroup: the path named does not exist below it.
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 << 30}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{1 << 30}\n")
    write(root, "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 0\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "50000\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    found = detect_hardware(root)
    assert (found.cores, found.memory_total, found.memory_available) == (1, 4 << 30, 3 << 30)


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, (None, 0)),
        ({"memory.max": "max"}, (None, 0)),
        ({"memory.limit_in_bytes": "9223372036854771712"}, (None, 0)),
        ({"memory.max": "1000", "memory.current": "400"}, (1000, 400)),
        ({"memory.max": "1000", "memory.current": "400", "memory.stat": "inactive_file 900"}, (1000, 0)),
    ],
)
def test_memory_limits(tmp_path: Path, files: dict[str, str], limit: tuple[int | None, int]) -> None:
    for name, text in files.items():
        write(tmp_path, name, text + "\n")
    assert memory_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None),
        ({"cpu.cfs_quota_us": "400000", "cpu.cfs_period_us": "100000"}, 4.0),
    ],
)
def test_cpu_quotas(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    for name, text in files.items():
        write(tmp_path, name, text + "\n")
    assert cpu_quota(tmp_path) == quota


def test_only_folders_that_exist_are_looked_at(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "max")
    folders = cgroup_folders(tmp_path, "0::/a/b\n")
    assert folders == [tmp_path / "sys/fs/cgroup", tmp_path / "sys/fs/cgroup/a"]


def test_this_machine() -> None:
    found = detect_hardware()
    assert 1 <= found.cores <= len(os.sched_getaffinity(0))
    assert 0 <= found.memory_available <= found.memory_total
