"""Runs ops at once, or records them into a program that can be run again, like a CUDA graph.

Nothing is computed while a program is recorded. Its tensors are sized for the most rows, ops hold the addresses of
their tensors, and the number of rows is read from a cell, which may change between runs.
"""

import ctypes
import math
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64, c_uint8
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.structs import OPS, AnyOp, LinearOp, RecordedOp
from penstock.kernels.native.team import ThreadTeam

_CODES: dict[type[Any], tuple[int, str]] = {kind: (code, name) for code, (name, kind) in enumerate(OPS)}
_NAMES = dict(_CODES.values())

_OF_THREAD = threading.local()  # the sessions of each thread


class TimedOp(NamedTuple):
    label: str  # the kind of op, or which product it is: "qkv", "head", ...
    op: AnyOp
    seconds: float


class _Arena:
    """Memory for a program's tensors. Memory that a tensor no longer needs is used again."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._all: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not self._free[size]:
            self._all.append(torch.empty(size, dtype=torch.uint8))
            self._free[size].append(self._all[-1])
        memory = self._free[size].pop()
        # The tensor keeps the array alive, so the array is freed only with the last view of the tensor.
        array = (c_uint8 * size).from_address(memory.data_ptr())
        weakref.finalize(array, self._free[size].append, memory).atexit = False
        return torch.frombuffer(array, dtype=dtype).view(shape)

    def __len__(self) -> int:
        return len(self._all)


class Program:
    """Ops in order, with the cells that hold their numbers of rows. Python functions may be called between ops."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team
        self._arena = _Arena()
        self._cells: dict[int, c_int64] = {}  # by the address of a tensor's memory
        self._kept: list[Any] = []
        self._recorded: list[RecordedOp] = []
        self._labels: list[str] = []  # of the recorded ops
        self._calls: list[tuple[int, Callable[[], None]]] = []  # (after how many ops, function)
        self._ops: ctypes.Array[RecordedOp] | None = None
        # (ops, how many, function to call after them)
        self._segments: list[tuple[Any, int, Callable[[], None] | None]] = []

    def input(self, tensor: Tensor, rows: c_int64) -> Tensor:
        """Declare a tensor that the caller fills before each run, and the cell that holds its number of rows."""
        self._cells[tensor.untyped_storage().data_ptr()] = rows
        self._kept.append(tensor)
        return tensor

    def cell(self, tensor: Tensor) -> c_int64:
        return self._cells[tensor.untyped_storage().data_ptr()]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, rows: c_int64) -> Tensor:
        tensor = self._arena.empty(shape, dtype)
        self._cells[tensor.untyped_storage().data_ptr()] = rows
        return tensor

    def append(self, op: RecordedOp, label: str, keep: Sequence[Any]) -> None:
        self._recorded.append(op)
        self._labels.append(label)
        self._kept.extend(keep)

    def call(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """Call a function between the ops before and those after, on the tensors' rows in use at that time."""
        # By address: holding the tensors themselves would keep their memory from being used again.
        each = [(_at(tensor), self.cell(tensor)) for tensor in tensors]
        self._calls.append((len(self._recorded), lambda: function(*(memory[: cell.value] for memory, cell in each))))

    def extend(self, program: "Program") -> None:
        """Append the ops and calls of another program, whose recording has ended."""
        self._calls += [(len(self._recorded) + place, call) for place, call in program._calls]
        self._recorded += program._recorded
        self._labels += program._labels
        self._kept.append(program)

    def replace(self, place: int, op: AnyOp) -> None:
        """Replace an op by another of its kind, after the recording has ended."""
        assert self._ops is not None, "the recording has not ended"
        setattr(self._ops[place].op, _CODES[type(op)][1], op)

    def end(self) -> None:
        self._ops = (RecordedOp * len(self._recorded))(*self._recorded)
        begin = 0
        for end, call in (*self._calls, (len(self._recorded), None)):
            self._segments.append((ctypes.byref(self._ops, begin * ctypes.sizeof(RecordedOp)), end - begin, call))
            begin = end

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def buffers(self) -> int:
        """How many buffers its tensors share."""
        return len(self._arena)

    def run(self) -> None:
        """Run all ops on the present values of cells and inputs."""
        assert self._ops is not None, "the recording has not ended"
        for ops, count, call in self._segments:
            if count:
                self._team.run(ops, count)
            if call is not None:
                call()

    def profile(self) -> list[float]:
        """`run`, and return the seconds that each op took, for `timed`. Slower by one reading of the clock per op."""
        assert self._ops is not None, "the recording has not ended"
        seconds: list[float] = []
        for ops, count, call in self._segments:
            seconds += self._team.profile(ops, count)
            if call is not None:
                call()
        return seconds

    def timed(self, seconds: Sequence[float]) -> list[TimedOp]:
        """The ops with their labels and seconds."""
        ops: list[AnyOp] = [getattr(entry.op, _NAMES[entry.code]) for entry in self._recorded]
        return [TimedOp(*each) for each in zip(self._labels, ops, seconds, strict=True)]


def _at(tensor: Tensor) -> Tensor:
    """A tensor of the same memory, which does not keep it from being used again."""
    memory = (c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


class Session:
    """The state that native providers share: a team of threads, and the program that is being recorded, if any."""

    def __init__(self, team: ThreadTeam) -> None:
        self.team = team
        self.product = ""  # the name of the product that runs next: the label of its ops
        self._program: Program | None = None
        self._rows = c_int64()  # the rows of an op that runs at once
        self._one = (RecordedOp * 1)()  # the op that runs at once
        self._op = self._one[0].op  # its fields, which every op overwrites

    def wake(self) -> None:
        """Wake the threads, as a step begins: its first op comes soon."""
        self.team.wake()

    @contextmanager
    def record(self) -> Iterator[Program]:
        assert self._program is None, "one recording at a time"
        self._program = program = Program(self.team)
        try:
            yield program
        finally:
            self._program = None
        program.end()

    def rows(self, tensor: Tensor) -> int:
        if self._program is not None:
            return ctypes.addressof(self._program.cell(tensor))
        self._rows.value = tensor.shape[0]
        return ctypes.addressof(self._rows)

    def cell(self, tensor: Tensor) -> int | None:
        """The address of the cell with the tensor's number of rows; None if nothing is recorded."""
        return None if self._program is None else ctypes.addressof(self._program.cell(tensor))

    def empty(self, like: Tensor, *row: int, dtype: torch.dtype) -> Tensor:
        """A tensor with as many rows as `like`, each of shape `row`."""
        shape = (like.shape[0], *row)
        if self._program is not None:
            return self._program.empty(shape, dtype, self._program.cell(like))
        return torch.empty(shape, dtype=dtype)

    def run(self, op: AnyOp, *keep: Any) -> None:
        """Run or record an op. `keep`: objects that the op points to, to be kept alive as long as the program."""
        code, name = _CODES[type(op)]
        if self._program is None:
            self._one[0].code = code
            setattr(self._op, name, op)
            self.team.run(self._one, 1)
            return
        entry = RecordedOp(code)
        setattr(entry.op, name, op)
        label = self.product if isinstance(op, LinearOp) else ""
        self._program.append(entry, label or name, keep)

    def call(self, function: Callable[..., None], *tensors: Tensor) -> None:
        """Call a function, which may change the tensors: at once, or on every run of the recorded program."""
        if self._program is None:
            function(*tensors)
        else:
            self._program.call(function, tensors)


def rest_teams() -> None:
    """Let the threads of the calling thread's sessions sleep until their next run."""
    for session in _OF_THREAD.__dict__.get("sessions", {}).values():
        session.team.rest()


def native_session(isa: str = "", threads: int = 0) -> Session:
    """The calling thread's session, by default with the best instruction set and as many threads as torch uses. Engines
    on several threads of a process have one each, as a team serves one thread."""
    sessions: dict[tuple[str, int], Session] = _OF_THREAD.__dict__.setdefault("sessions", {})
    isa, threads = isa or instruction_sets()[0], threads or torch.get_num_threads()
    if (isa, threads) not in sessions:
        cpus = sorted(os.sched_getaffinity(0))
        # One thread per processor: each is pinned to its own. With fewer the operating system places them.
        team = ThreadTeam(isa, threads, cpus if 1 < threads == len(cpus) else ())
        sessions[isa, threads] = Session(team)
    return sessions[isa, threads]
