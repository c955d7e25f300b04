"""Running ops at once, or recording them to be run again: what a CUDA graph is to a GPU.

While a program is recorded nothing is computed. Its tensors have room for the most rows, every op gets the addresses
of its tensors, and how many rows there are stands in a cell that a later run may change.
"""

import ctypes
import math
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64, c_uint8
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.structs import OPS, AnyOp, CacheOp, LinearOp, TaggedOp
from penstock.kernels.native.team import ThreadTeam

_CODES: dict[type[Any], tuple[int, str]] = {kind: (code, name) for code, (name, kind) in enumerate(OPS)}
_NAMES = dict(_CODES.values())
_PRODUCTS = {  # by what was before: a program of the head's begins within a layer
    "": "output",
    "attention": "output",
    "gate_up": "down",
    "output": "router",
    "route": "shared_gate",
}


class TimedOp(NamedTuple):
    """An op of a program that was profiled."""

    label: str  # what it is, and of a product which: "qkv", "head", ... (see _labels)
    op: AnyOp
    seconds: float


class _Arena:
    """Memory for a program's tensors: what one tensor no longer needs, a later one gets."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._all: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not self._free[size]:
            self._all.append(torch.empty(size, dtype=torch.uint8))
            self._free[size].append(self._all[-1])
        memory = self._free[size].pop()
        # The tensor holds the array, and the array is gone only when no view of the tensor is left.
        array = (c_uint8 * size).from_address(memory.data_ptr())
        weakref.finalize(array, self._free[size].append, memory).atexit = False
        return torch.frombuffer(array, dtype=dtype).view(shape)

    def __len__(self) -> int:
        return len(self._all)


class Program:
    """Ops in order, and the cells that say how many rows they have. Between ops, Python may be called."""

    def __init__(self, team: ThreadTeam) -> None:
        self._team = team
        self._arena = _Arena()
        self._cells: dict[int, c_int64] = {}  # by the address of a tensor's memory
        self._kept: list[Any] = []
        self._recorded: list[TaggedOp] = []
        self._calls: list[tuple[int, Callable[[], None]]] = []  # each after so many ops
        self._ops: ctypes.Array[TaggedOp] | None = None
        self._segments: list[tuple[Any, int, Callable[[], None] | None]] = []  # ops, how many, and what is called then

    def input(self, tensor: Tensor, rows: c_int64) -> Tensor:
        """Declare a tensor that is filled before a run, and the cell that says how many of its rows count."""
        self._cells[tensor.untyped_storage().data_ptr()] = rows
        self._kept.append(tensor)
        return tensor

    def cell(self, tensor: Tensor) -> c_int64:
        return self._cells[tensor.untyped_storage().data_ptr()]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, rows: c_int64) -> Tensor:
        tensor = self._arena.empty(shape, dtype)
        self._cells[tensor.untyped_storage().data_ptr()] = rows
        return tensor

    def append(self, op: TaggedOp, keep: Sequence[Any]) -> None:
        self._recorded.append(op)
        self._kept.extend(keep)

    def call(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """Call a function of tensors, of as many rows as count then, between the ops before and those after."""
        # By their addresses: the memory of a tensor that is held is given to no other.
        each = [(_at(tensor), self.cell(tensor)) for tensor in tensors]
        self._calls.append((len(self._recorded), lambda: function(*(memory[: cell.value] for memory, cell in each))))

    def extend(self, program: "Program") -> None:
        """Append what another does, which has ended."""
        self._calls += [(len(self._recorded) + place, call) for place, call in program._calls]
        self._recorded += program._recorded
        self._kept.append(program)

    def replace(self, place: int, op: AnyOp) -> None:
        """Put an op in the place of one of its kind, after the end."""
        assert self._ops is not None, "the recording has not ended"
        setattr(self._ops[place].op, _CODES[type(op)][1], op)

    def end(self) -> None:
        self._ops = (TaggedOp * len(self._recorded))(*self._recorded)
        begin = 0
        for end, call in (*self._calls, (len(self._recorded), None)):
            self._segments.append((ctypes.byref(self._ops, begin * ctypes.sizeof(TaggedOp)), end - begin, call))
            begin = end

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def buffers(self) -> int:
        """How many pieces of memory its tensors share."""
        return len(self._arena)

    def run(self) -> None:
        """All ops, with what the cells and the inputs hold now."""
        assert self._ops is not None, "the recording has not ended"
        for ops, count, call in self._segments:
            if count:
                self._team.run(ops, count)
            if call is not None:
                call()

    def profile(self) -> list[float]:
        """Run; gives the seconds that each op took, for `timed`. Costs a look at the clock per op more than `run`."""
        assert self._ops is not None, "the recording has not ended"
        seconds: list[float] = []
        for ops, count, call in self._segments:
            seconds += self._team.profile(ops, count)
            if call is not None:
                call()
        return seconds

    def timed(self, seconds: Sequence[float]) -> list[TimedOp]:
        """The ops, with what they took."""
        ops: list[AnyOp] = [getattr(entry.op, _NAMES[entry.code]) for entry in self._recorded]
        return [TimedOp(*each) for each in zip(_labels(ops), ops, seconds, strict=True)]


def _at(tensor: Tensor) -> Tensor:
    """The same memory, without keeping it from being used again."""
    memory = (c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def _labels(ops: Sequence[AnyOp]) -> list[str]:
    """Products go by what stands around them: a layer's are before the cache, after attention, gated, and the next;
    those of a mixture that are not its experts' stand before and after the routing."""
    labels: list[str] = []
    last = ""
    for i, op in enumerate(ops):
        label = _CODES[type(op)][1]
        if isinstance(op, LinearOp):
            if op.epilogue:
                label = "gate_up"
            elif i + 1 < len(ops) and isinstance(ops[i + 1], CacheOp):
                label = "qkv"
            else:
                label = _PRODUCTS.get(last, "head")
        if label != "norm":
            last = label
        labels.append(label)
    return labels


class Session:
    """What the native providers share: an engine, and whether ops are run or recorded."""

    def __init__(self, team: ThreadTeam) -> None:
        self.team = team
        self._program: Program | None = None
        self._rows = c_int64()  # of an op that runs at once
        self._one = (TaggedOp * 1)()

    def wake(self) -> None:
        """A step begins: have threads awake when its first op comes."""
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
        """The address of how many rows the tensor has."""
        if self._program is not None:
            return ctypes.addressof(self._program.cell(tensor))
        self._rows.value = tensor.shape[0]
        return ctypes.addressof(self._rows)

    def empty(self, like: Tensor, *row: int, dtype: torch.dtype) -> Tensor:
        """A tensor of as many rows as `like`, each of shape `row`."""
        shape = (like.shape[0], *row)
        if self._program is not None:
            return self._program.empty(shape, dtype, self._program.cell(like))
        return torch.empty(shape, dtype=dtype)

    def run(self, op: AnyOp, *keep: Any) -> None:
        """Run or record. `keep` is what the op points to that nobody else holds as long as a program may be run."""
        code, name = _CODES[type(op)]
        if self._program is None:
            self._one[0].code = code
            setattr(self._one[0].op, name, op)
            self.team.run(self._one, 1)
            return
        entry = TaggedOp(code)
        setattr(entry.op, name, op)
        self._program.append(entry, keep)

    def call(self, function: Callable[..., None], *tensors: Tensor) -> None:
        """Call a function, which may change the tensors: at once, or whenever what is recorded is run."""
        if self._program is None:
            function(*tensors)
        else:
            self._program.call(function, tensors)


def native_session(isa: str = "", threads: int = 0) -> Session:
    """The process's one team of threads: of the best instruction set and as many as torch uses, unless told."""
    return _session(isa or instruction_sets()[0], threads or torch.get_num_threads())


@cache
def _session(isa: str, threads: int) -> Session:
    cpus = sorted(os.sched_getaffinity(0))
    # With a thread for each processor, each stays on its own; with fewer, others decide who runs where.
    return Session(ThreadTeam(isa, threads, cpus if 1 < threads == len(cpus) else ()))
