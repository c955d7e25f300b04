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

from penstock.families.checkpoint.safetensors_file import ELEMENT_BITS
from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.families.spec import Parameter, TensorSource
from penstock.gguf import TYPES
from penstock.weights.stacks import NIBBLES

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
    element: int = 1  # bytes of a column

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
        """Whether rows are read from end to end and stay as they are."""
        whole = self.width == self.source.row_bytes
        return whole and not self.transposed and self.source.exponents is None and self.source.scales is None


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
            skip = _row_bytes(stored, source.first_column)
            width = _row_bytes(stored, source.columns) if source.columns else stored.row_bytes
            count = size // width
            count = max(count // READ_ROWS * READ_ROWS, min(count, READ_ROWS), 1)
            for first, target, rows, step in _runs(source, source.order or _interleaved(stored.rotary_dim)):
                for done in range(0, rows, count):
                    place = (first + done * step, min(count, rows - done), skip, width)
                    yield PlannedRead(stored, *place, packers[parameter.name], target + done, step)


def _plan_transposed(
    source: TensorSource, stored: StoredTensor, packer: Any, columns: int, size: int
) -> Iterator[PlannedRead]:
    """The reads of a tensor [in, out], each of some columns of it."""
    element = stored.row_bytes // stored.shape[1]
    count = max(size // (columns * element) // READ_ROWS * READ_ROWS, READ_ROWS)
    for done in range(0, source.rows, count):
        rows, step = min(count, source.rows - done), source.step
        skip = (source.first_row + done * step) * element
        place = (source.first_column, columns, skip, rows * element)
        target = source.start + done
        yield PlannedRead(stored, *place, packer, target, transposed=True, column_step=step, element=element)


def _runs(source: TensorSource, order: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[int, int, int, int]]:
    """The rows of a source in order, as (first row of the tensor, row of the parameter, count, step). `order` is that
    of the rows of a head (see TensorSource). Ranks have whole heads."""
    if not order:
        yield source.first_row, source.start, source.rows, source.step
        return
    for head in range(0, source.rows, sum(count for _, count, _ in order)):
        target = source.start + head
        for first, count, step in order:
            yield source.first_row + head + first, target, count, step
            target += count


def _interleaved(rotary_dim: int) -> tuple[tuple[int, int, int], ...]:
    """The order of a head's rows that are interleaved in the file: row 2 i + s is the head's row
    s * rotary_dim / 2 + i."""
    half = rotary_dim // 2
    return ((0, half, 2), (1, half, 2)) if half else ()


def _row_bytes(stored: StoredTensor, columns: int) -> int:
    """Bytes of the first `columns` of a row."""
    kind = TYPES.get(stored.dtype)
    if kind is None or not kind.quantized:
        return columns * (ELEMENT_BITS[stored.dtype] // 8)
    if columns % kind.block_values:
        raise CheckpointError(
            f"{stored.path}: {stored.name} is {kind.name}, whose blocks of {kind.block_values} values cannot be "
            f"divided at column {columns}: use fewer ranks (--tensor-parallel-size)"
        )
    return kind.row_bytes(columns)


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
    if source.exponents is not None:
        _read_pairs(files, target, read, source.exponents)
    elif read.full_rows and read.step == 1:
        _read_rows(files[source.path], target, read)
    else:
        rows = target.reshape(read.count, read.width)
        _read_parts(files[source.path], rows, read.begin, read.stride, read)


def _read_rows(descriptor: int, target: NDArray[np.uint8], read: PlannedRead) -> None:
    view, offset = target.data, read.begin
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise _truncated(read, offset)
        view, offset = view[count:], offset + count


def _read_parts(descriptor: int, target: NDArray[np.uint8], begin: int, stride: int, read: PlannedRead) -> None:
    """Copy rows, or a part of each, that do not lie together, to `target` [rows, width]: they begin `stride` bytes
    apart from `begin` on. The file's size is checked first: touching a page beyond its end kills the process."""
    count, width = target.shape
    element = read.element if read.column_step > 1 else width
    shape, strides = (count, width // element, element), (stride, read.column_step * element, 1)
    end = begin + sum((length - 1) * apart for length, apart in zip(shape, strides, strict=True)) + 1
    if (size := os.fstat(descriptor).st_size) < end:
        raise _truncated(read, size)
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with mmap.mmap(descriptor, end - start, prot=mmap.PROT_READ, offset=start) as pages:
        rows = np.ndarray(shape, np.uint8, buffer=pages, offset=begin - start, strides=strides)
        np.copyto(target.reshape(shape), rows)
        del rows  # a map cannot be closed while an array refers to it


def _read_pairs(
    files: Mapping[Path, int], target: NDArray[np.uint8], read: PlannedRead, exponents: StoredTensor
) -> None:
    """Make rows of MXFP4 as a GGUF file has them. There a block is an exponent and 16 bytes: values 0 to 15 in their
    low halves, 16 to 31 in the high ones. Here neighbours share a byte."""
    block = NIBBLES + 1
    skipped, blocks, in_row = read.skip // block, read.width // block, read.source.row_bytes // block
    parts = []
    for tensor, size in ((read.source, NIBBLES), (exponents, 1)):
        part = np.empty((read.count, blocks * size), np.uint8)
        begin = tensor.offset + (read.first * in_row + skipped) * size
        _read_parts(files[tensor.path], part, begin, read.step * in_row * size, read)
        parts.append(part.reshape(read.count, blocks, size))
    pairs, out = parts[0], target.reshape(read.count, blocks, block)
    even, odd, half = pairs & 15, pairs >> 4, NIBBLES // 2
    out[:, :, :1] = parts[1]
    out[:, :, 1::2] = even[:, :, :half] | even[:, :, half:] << 4
    out[:, :, 2::2] = odd[:, :, :half] | odd[:, :, half:] << 4


def _truncated(read: PlannedRead, offset: int) -> CheckpointError:
    return CheckpointError(f"{read.source.path}: ended at byte {offset} while {read.source.name!r} was read")
