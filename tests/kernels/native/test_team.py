"""The team of threads that runs native ops: correct with more threads than processors, and idle afterwards."""

import os
import time
from ctypes import c_int64

import pytest
import torch
from torch import Tensor

from penstock.kernels.native.linear import NativeLinear
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.pack import pack
from penstock.kernels.native.session import Session
from penstock.kernels.native.team import ThreadTeam
from tests.kernels.native.reference import FROM_FLOATS

WIDTH, COLUMNS, MOST_ROWS = 40, 72, 3
PROGRAMS = 2000


def threads_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


class Tiny:
    """A program of two ops, whose loops all threads share."""

    def __init__(self, session: Session) -> None:
        generator = torch.Generator().manual_seed(0)
        weight = pack(torch.randn(COLUMNS, WIDTH, generator=generator), None, FROM_FLOATS["int8"])
        norm, linear = NativeNorm(session), NativeLinear(session)
        self._rows, self._x = c_int64(), torch.zeros(MOST_ROWS, WIDTH)
        with session.record() as self._program:
            x = self._program.input(self._x, self._rows)
            self._out = linear(norm(x, None, torch.ones(WIDTH), 1e-6, 0.0)[0], weight)

    def __call__(self, x: Tensor) -> Tensor:
        self._rows.value = len(x)
        self._x[: len(x)] = x
        self._program.run()
        return self._out[: len(x)].clone()


@pytest.fixture
def team() -> ThreadTeam:
    return ThreadTeam(instruction_sets()[0], 4)


def test_thousands_of_tiny_programs_give_what_one_thread_gives(team: ThreadTeam) -> None:
    """Most programs begin while a worker sleeps, or has not left the program before."""
    ours, theirs = Tiny(Session(team)), Tiny(Session(ThreadTeam(team.isa, 1)))
    generator = torch.Generator().manual_seed(1)
    for i in range(PROGRAMS):
        x = torch.randn(i % (MOST_ROWS + 1), WIDTH, generator=generator)
        assert torch.equal(ours(x), theirs(x)), i
        if i % 100 == 0:
            time.sleep(0.002)  # longer than a worker waits awake


def test_an_idle_team_sleeps(team: ThreadTeam) -> None:
    Tiny(Session(team))(torch.ones(2, WIDTH))
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.1


def test_stopping_ends_the_threads() -> None:
    before = threads_of_this_process()
    team = ThreadTeam(instruction_sets()[0], 4)
    Tiny(Session(team))(torch.ones(2, WIDTH))
    made = threads_of_this_process() - before
    assert len(made) == 3
    team.close()
    assert not made & threads_of_this_process()
    team.close()  # again does nothing
