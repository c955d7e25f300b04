"""The cores and the memory that this process may use. Reads /proc and cgroups; no torch."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    cores: int  # that this process may use, by affinity and cgroup quota
    memory_total: int  # bytes: the machine's, or the cgroup's limit if that is less; with a GPU, the GPU's
    memory_available: int  # bytes that can be had now without swapping; with a GPU, all of it
    device: Literal["cpu", "cuda"] = "cpu"
    name: str = ""  # of the GPU
    gpus: int = 0  # alike, for a rank each
    capability: str = ""  # of the GPU: "9.0"; "": not known
    shared: bool = True  # whether all ranks of a model share it; if not, each has as much
    promised: int = 0  # bytes that other servers may still take; they do not count as available


def has_capability(capability: str, least: tuple[int, int]) -> bool:
    """Whether a GPU's compute capability, as "9.0", is at least `least`."""
    major, minor = capability.split(".")
    return (int(major), int(minor)) >= least


def detect_hardware(root: Path = Path("/")) -> Hardware:
    """The hardware that this process may use, from proc and sys/fs/cgroup below `root`."""
    total, available = parse_meminfo(_read(root / "proc/meminfo"))
    cores = float(len(os.sched_getaffinity(0)))
    for folder in cgroup_folders(root, _read(root / "proc/self/cgroup")):
        limit, used = memory_limit(folder)
        if limit is not None:
            total, available = min(total, limit), min(available, max(limit - used, 0))
        cores = min(cores, cpu_quota(folder) or cores)
    return Hardware(cores=max(int(cores), 1), memory_total=total, memory_available=available)


def parse_meminfo(text: str) -> tuple[int, int]:
    """Bytes (total, available) from /proc/meminfo. Raises ValueError if either is missing."""
    sizes = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if value.strip():
            sizes[name] = int(value.split()[0]) * 1024
    if "MemTotal" not in sizes or "MemAvailable" not in sizes:
        raise ValueError("/proc/meminfo lacks MemTotal or MemAvailable: the memory cannot be sized")
    return sizes["MemTotal"], sizes["MemAvailable"]


def cgroup_folders(root: Path, text: str) -> list[Path]:
    """Folders of the process's cgroups and all above them, from /proc/self/cgroup, versions 1 and 2.

    Inside a container the mount may begin further down, so that the path does not exist: then the mount's root is used.
    """
    mount = root / "sys/fs/cgroup"
    folders = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [mount, mount / "unified"]
        else:
            bases = [mount / name for name in controllers.split(",") if name in {"memory", "cpu"}]
        steps = [step for step in path.split("/") if step]
        for base in bases:
            folders += [base.joinpath(*steps[:depth]) for depth in range(len(steps) + 1)]
    return [folder for folder in folders if folder.is_dir()]


def memory_limit(folder: Path) -> tuple[int | None, int]:
    """Bytes (limit or None, used) of a cgroup. Used does not count file pages that the kernel would drop first."""
    for limit_file, used_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit = _read(folder / limit_file).strip()
        if limit.isdigit() and int(limit) < 2**60:  # version 1 writes "no limit" as a huge number
            stat = dict(_pairs(_read(folder / "memory.stat").splitlines()))
            return int(limit), max(int(_read(folder / used_file).strip() or 0) - stat.get(cached, 0), 0)
    return None, 0


def cpu_quota(folder: Path) -> float | None:
    """CPUs that a cgroup's quota allows; None without one."""
    fields = _read(folder / "cpu.max").split()
    if not fields:
        fields = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(fields) != 2 or not all(field.isdigit() for field in fields) or int(fields[1]) == 0:
        return None  # "max", -1 or no such file
    return int(fields[0]) / int(fields[1])


def _pairs(lines: Iterable[str]) -> Iterable[tuple[str, int]]:
    for line in lines:
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            yield name, int(value)


def _read(path: Path) -> str:
    """A file's text; empty if it does not exist or may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
