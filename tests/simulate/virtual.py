"""A ban of every clock and of all randomness without a seed, by replacing what reads them while a simulation runs."""

import asyncio
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
CHANCE = (
    "random",
    "randint",
    "choice",
    "choices",
    "shuffle",
    "uniform",
    "gauss",
    "expovariate",
    "getrandbits",
    "sample",
)


class RealWorldRead(Exception):
    """A clock of the machine, or randomness without a seed, was read."""


def _fail(*_: object, **__: object) -> None:
    raise RealWorldRead


@contextmanager
def virtual_world() -> Iterator[None]:
    """While this lasts, every such read raises RealWorldRead, whatever module it comes from and under whatever name."""
    banned = {id(getattr(time, name)) for each in CLOCKS for name in (each, f"{each}_ns")} | {id(time.sleep)}
    banned |= {id(os.urandom), id(secrets.token_bytes), id(uuid.uuid4), id(uuid.uuid1)}
    unseeded, made = {name: getattr(random, name) for name in CHANCE}, random.Random.__init__
    modules = [time, os, secrets, uuid, *(m for name, m in sys.modules.items() if name.startswith("penstock"))]

    def seeded(self: random.Random, x: object = None) -> None:
        if x is None:
            raise RealWorldRead
        made(self, x)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name in [name for name, value in vars(module).items() if id(value) in banned]:
                patch.setattr(module, name, _fail)
        for name in unseeded:
            patch.setattr(random, name, _fail)
        patch.setattr(random.Random, "__init__", seeded)
        patch.setattr(asyncio.BaseEventLoop, "time", _fail)
        yield
