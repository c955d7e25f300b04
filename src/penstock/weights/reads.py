"""The reads that fetch a model's tensors from their files. No torch here: weights are read while torch is imported.

A read of whole rows is a system call. Columns are too narrow for one call per row: the pages of the file are mapped and
the columns are copied out of them, which is as fast as reading whole rows.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.families.spec import Parameter, TensorSource

if TYPE_CHECKING:
    from penstock.kernels import Packer

READ_BYTES = 1 << 20  # large enough to keep a disk busy, small enough to be still in the cache when it is packed
DEVICE_READ_BYTES = 8 << 20  # for weights packed on a device: each read takes a copy and a few kernels
READ_ROWS = 16  # a read of a larger tensor has a multiple of so many rows: whole blocks of packed weights
READERS = 8


@dataclass(frozen=True)
class PlannedRead:
    """`count` rows of a stored tensor: every `step`-th from row `first` on. In each row it reads `width` bytes from
    byte `skip`."""

    source: StoredTensor
    first: int
    count: int
    skip: int
    width: int
    packer: "Packer"  # takes the rows,
    target: int  # the first of which becomes this row of the parameter
    step: int = 1
    transposed: bool = False  # the rows' columns become the parameter's rows,
    column_step: int = 1  # every so manyth of them

    @property
    def bytes(self) -> int:
        return self.count * self.width

    @property
    def begin(self) -> int:
        """The offset of the first byte in the file."""
        return self.source.offset + self.first * self.source.row_bytes + self.skip

    @property
    def stride(self) -> int:
        """Bytes in the file from one row to the next."""
        return self.step * self.source.row_bytes

    @property
    def full_rows(self) -> bool:
        """Whether rows are read from end to end."""
        return self.width == self.source.row_bytes and not self.transposed

    @property
    def part(self) -> tuple[range, range]:
        """The rows and the columns of the tensor that are read."""
        values, size = self.source.block
        columns = self.skip // size * values
        return (
            range(self.first, self.first + self.count * self.step, self.step),
            range(columns, columns + self.width // size * values * self.column_step, self.column_step),
        )


def plan_reads(
    parameters: Iterable[Parameter],
    tensors: Mapping[str, StoredTensor],
    packers: Mapping[str, Any],
    *,
    on_device: bool = False,
) -> Iterator[PlannedRead]:
    """The reads that fetch all of the parameters. `packers` are by parameter name."""
    size = DEVICE_READ_BYTES if on_device else READ_BYTES
    for parameter in parameters:
        for source in parameter.sources:
            stored = tensors[source.name]
            if source.transposed:
                yield from _plan_transposed(source, stored, packers[parameter.name], parameter.shape[1], size)
                continue
            skip = stored.bytes_of(source.first_column)
            width = stored.bytes_of(source.columns) if source.columns else stored.row_bytes
            count = size // width
            count = max(count // READ_ROWS * READ_ROWS, min(count, READ_ROWS), 1)
            for first, target, rows, step in row_runs(source):
                for done in range(0, rows, count):
                    place = (first + done * step, min(count, rows - done), skip, width)
                    yield PlannedRead(stored, *place, packers[parameter.name], target + done, step)


def _plan_transposed(
    source: TensorSource, stored: StoredTensor, packer: Any, columns: int, size: int
) -> Iterator[PlannedRead]:
    """The reads of a tensor [in, out], each of some columns of it."""
    element = stored.bytes_of(1)
    count = max(size // (columns * element) // READ_ROWS * READ_ROWS, READ_ROWS)
    for done in range(0, source.rows, count):
        rows, step = min(count, source.rows - done), source.step
        skip = (source.first_row + done * step) * element
        place = (source.first_column, columns, skip, rows * element)
        target = source.start + done
        yield PlannedRead(stored, *place, packer, target, transposed=True, column_step=step)


def row_runs(source: TensorSource) -> Iterator[tuple[int, int, int, int]]:
    """The rows of a source in order, as (first row of the tensor, row of the parameter, count, step). Ranks have whole
    heads."""
    if not source.order:
        yield source.first_row, source.start, source.rows, source.step
        return
    for head in range(0, source.rows, sum(count for _, count, _ in source.order)):
        target = source.start + head
        for first, count, step in source.order:
            yield source.first_row + head + first, target, count, step
            target += count


def open_files(tensors: Mapping[str, StoredTensor], stack: ExitStack) -> dict[Path, int]:
    """Descriptors of the tensors' files. The stack closes them."""
    files = {}
    for path in sorted({tensor.path for tensor in tensors.values()}):
        files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, files[path])
    return files


def read_into(files: Mapping[Path, int], target: NDArray[np.uint8], read: PlannedRead) -> None:
    """Fill `target` [read.bytes] from open files."""
    source = read.source
    if read.full_rows and read.step == 1:
        _read_run(files[source.path], target, read.begin, source)
        return
    element = source.block[1] if read.column_step > 1 else read.width
    shape, strides = (read.count, read.width // element, element), (read.stride, read.column_step * element, 1)
    _read_parts(files[source.path], target.reshape(shape), read.begin, strides, source)


def read_part(files: Mapping[Path, int], tensor: StoredTensor, rows: range, skip: int, width: int) -> NDArray[np.uint8]:
    """Returns `width` bytes from byte `skip` of some rows of a tensor, [rows, width]."""
    target, in_row = np.empty((len(rows), width), np.uint8), tensor.row_bytes
    begin = tensor.offset + rows[0] * in_row + skip
    if width == in_row and rows.step == 1:
        _read_run(files[tensor.path], target.reshape(-1), begin, tensor)
    else:
        strides = rows.step * in_row, width, 1
        _read_parts(files[tensor.path], target[:, None], begin, strides, tensor)
    return target


def _read_run(descriptor: int, target: NDArray[np.uint8], begin: int, tensor: StoredTensor) -> None:
    """Fill `target` with the bytes that follow `begin`."""
    view, offset = target.data, begin
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise _truncated(tensor, offset)
        view, offset = view[count:], offset + count


def _read_parts(
    descriptor: int, target: NDArray[np.uint8], begin: int, strides: tuple[int, int, int], tensor: StoredTensor
) -> None:
    """Copy rows, or a part of each, that do not lie together, to `target` [rows, parts, bytes]: in the file they begin
    at `begin`, with these strides. The file's size is checked first: touching a page beyond its end kills the
    process."""
    shape = target.shape
    end = begin + sum((length - 1) * apart for length, apart in zip(shape, strides, strict=True)) + 1
    if (size := os.fstat(descriptor).st_size) < end:
        raise _truncated(tensor, size)
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, end - start, prot=mmap.PROT_READ, offset=start) as pages:
        rows = np.ndarray(shape, np.uint8, buffer=pages, offset=begin - start, strides=strides)
        np.copyto(target, rows)
        del rows  # a map cannot be closed while an array refers to it


def _truncated(tensor: StoredTensor, offset: int) -> CheckpointError:
    return CheckpointError(f"{tensor.path}: ended at byte {offset} while {tensor.name!r} was read")
