"""Fixtures for every room. Tiny checkpoints are written by tests.checkpoints."""

import gc
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.checkpoints import write_tiny_checkpoint

gc.disable()  # until all tests are collected: 3 of 14 seconds went into walks over modules, none of which is garbage

if not torch.cuda.is_available():  # Triton's kernels are interpreted then: it asks when it is imported, by whomever
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in each run, however busy the machine is. `--hypothesis-profile new`, as in `make test-all`, draws
# others each time, and prints how to draw those again that fail.
SAME = settings(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", SAME)
settings.register_profile("new", SAME, derandomize=False, print_blob=True)
settings.load_profile("same")

# Each client of httpx reads the system's authorities, which takes 20 ms, and many tests make clients by the dozen.
httpx._transports.default.create_ssl_context = cache(httpx._transports.default.create_ssl_context)

PROCESSORS = os.sched_getaffinity(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of tens of seconds begin before all others: in the end no worker waits for another one's."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """The tests and their modules stay as they are, as what a server has when it is ready: a collection of garbage that
    walks over them takes a second, in which this process cannot answer a server."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def any_processor() -> Iterator[None]:
    """A team of native threads keeps whoever makes it on one processor, and all that is started from there: not beyond
    a test, or those that run side by side would end on the same one."""
    os.sched_setaffinity(0, PROCESSORS)
    yield
    os.sched_setaffinity(0, PROCESSORS)


@pytest.fixture(autouse=True)
def garbage_collected() -> Iterator[None]:
    """A command that is refused leaves the collector off, as its process would end. A worker would grow by GB."""
    yield
    gc.enable()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_checkpoint(variant, dtype=, seed=, shards=) gives a folder, written once per session: do not change it."""
    written: dict[tuple[object, ...], Path] = {}

    def folder(variant: str, *, dtype: str = "float32", seed: int = 0, shards: int | None = None) -> Path:
        key = (variant, dtype, seed, shards)
        if key not in written:
            target = tmp_path_factory.mktemp(f"{variant}-{dtype}")
            written[key] = write_tiny_checkpoint(variant, target, dtype=dtype, seed=seed, shards=shards)
        return written[key]

    return folder
