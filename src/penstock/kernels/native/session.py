"""Running ops at once, or recording them to be run again: what a CUDA graph is to a GPU.

While a program is recorded nothing is computed. Its tensors have room for the most rows, every op gets the addresses
of its tensors, and how many rows there are stands in a cell that a later run may change.
"""

import ctypes
import math
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64, c_uint8
from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.native.library import (
    ATTENTION,
    CACHE,
    EMBEDDING,
    LINEAR,
    NORM,
    ROTATION,
    AttentionOp,
    CacheOp,
    EmbeddingOp,
    Engine,
    LinearOp,
    NormOp,
    Op,
    RotationOp,
    instruction_sets,
)

AnyOp = EmbeddingOp | NormOp | LinearOp | RotationOp | CacheOp | AttentionOp
_CODES: dict[type[Any], tuple[int, str]] = {
    EmbeddingOp: (EMBEDDING, "embedding"),
    NormOp: (NORM, "norm"),
    LinearOp: (LINEAR, "linear"),
    RotationOp: (ROTATION, "rotation"),
    CacheOp: (CACHE, "cache"),
    AttentionOp: (ATTENTION, "attention"),
}


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
        weakref.finalize(array, self._free[size].append, memory)
        return (
            torch.frombuffer(array, dtype=torch.uint8)[: torch.Size(shape).numel() * dtype.itemsize]
            .view(dtype)
            .view(shape)
        )


class Program:
    """Ops in order, and the cells that say how many rows they have."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._arena = _Arena()
        self._cells: dict[int, c_int64] = {}  # by the address of a tensor's memory
        self._kept: list[Any] = []
        self._recorded: list[Op] = []
        self._ops: ctypes.Array[Op] | None = None

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

    def append(self, op: Op, keep: Sequence[Any]) -> None:
        self._recorded.append(op)
        self._kept.extend(keep)

    def end(self) -> None:
        self._ops = (Op * len(self._recorded))(*self._recorded)

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self) -> None:
        """All ops, with what the cells and the inputs hold now."""
        assert self._ops is not None, "the recording has not ended"
        self._engine.run(self._ops, len(self._ops))


class Session:
    """What the native providers share: an engine, and whether ops are run or recorded."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._program: Program | None = None
        self._rows = c_int64()  # of an op that runs at once
        self._one = (Op * 1)()

    @contextmanager
    def record(self) -> Iterator[Program]:
        assert self._program is None, "one recording at a time"
        self._program = program = Program(self.engine)
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
            self.engine.run(self._one, 1)
            return
        entry = Op(code)
        setattr(entry.op, name, op)
        self._program.append(entry, keep)


def native_session() -> Session:
    """The process's one team of threads, as many as torch uses, of the best instruction set."""
    return _session(instruction_sets()[0], torch.get_num_threads())


@cache
def _session(isa: str, threads: int) -> Session:
    cpus = sorted(os.sched_getaffinity(0))
    # With a thread for each processor, each stays on its own; with fewer, others decide who runs where.
    return Session(Engine(isa, threads, cpus if 1 < threads == len(cpus) else ()))
