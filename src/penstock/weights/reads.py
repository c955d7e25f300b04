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

from penstock.families.spec import Parameter
from penstock.weights.safetensors_file import ELEMENT_BITS
from penstock.weights.stored import CheckpointError, StoredTensor

if TYPE_CHECKING:
    from penstock.kernels import Packer

READ_BYTES = 1 << 20  # large enough to keep a disk busy, small enough to be still in the cache when it is packed
DEVICE_READ_BYTES = 8 << 20  # for weights packed on a device: each read takes a copy and a few kernels
READ_ROWS = 16  # a read of a larger tensor has a multiple of so many rows: whole blocks of packed weights
READERS = 8


@dataclass(frozen=True)
class PlannedRead:
    """`count` rows of a stored tensor, from row `first`: of each row `width` bytes, from byte `skip`."""

    source: StoredTensor
    first: int
    count: int
    skip: int
    width: int
    packer: "Packer"  # takes the rows,
    target: int  # the first of which becomes this row of the parameter

    @property
    def bytes(self) -> int:
        return self.count * self.width

    @property
    def begin(self) -> int:
        """The offset of the first byte in the file."""
        return self.source.offset + self.first * self.source.row_bytes + self.skip

    @property
    def whole_rows(self) -> bool:
        """Whether the bytes lie together in the file."""
        return self.width == self.source.row_bytes


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
            element = ELEMENT_BITS[stored.dtype] // 8
            skip, width = source.first_column * element, source.columns * element or stored.row_bytes
            count = size // width
            count = max(count // READ_ROWS * READ_ROWS, min(count, READ_ROWS), 1)
            for done in range(0, source.rows, count):
                rows, target = min(count, source.rows - done), source.start + done
                yield PlannedRead(stored, source.first_row + done, rows, skip, width, packers[parameter.name], target)


def open_files(tensors: Mapping[str, StoredTensor], stack: ExitStack) -> dict[Path, int]:
    """Descriptors of the tensors' files. The stack closes them."""
    files = {}
    for path in sorted({tensor.path for tensor in tensors.values()}):
        files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, files[path])
    return files


def read_into(descriptor: int, target: NDArray[np.uint8], read: PlannedRead) -> None:
    """Fill `target` [read.bytes]."""
    if read.whole_rows:
        _read_rows(descriptor, target, read)
    else:
        _read_columns(descriptor, target, read)


def _read_rows(descriptor: int, target: NDArray[np.uint8], read: PlannedRead) -> None:
    view, offset = target.data, read.begin
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise _truncated(read, offset)
        view, offset = view[count:], offset + count


def _read_columns(descriptor: int, target: NDArray[np.uint8], read: PlannedRead) -> None:
    """Copy a part of each row. The file's size is checked first: touching a page beyond its end kills the process."""
    stride, begin = read.source.row_bytes, read.begin
    end = begin + (read.count - 1) * stride + read.width
    if (size := os.fstat(descriptor).st_size) < end:
        raise _truncated(read, size)
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    shape = (read.count, read.width)
    with mmap.mmap(descriptor, end - start, prot=mmap.PROT_READ, offset=start) as pages:
        rows = np.ndarray(shape, np.uint8, buffer=pages, offset=begin - start, strides=(stride, 1))
        np.copyto(target.reshape(shape), rows)
        del rows  # a map cannot be closed while an array refers to it


def _truncated(read: PlannedRead, offset: int) -> CheckpointError:
    return CheckpointError(f"{read.source.path}: ended at byte {offset} while {read.source.name!r} was read")
