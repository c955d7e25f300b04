"""What is read of a checkpoint at a time, and how. No torch here, so that weights are read before it is imported.

Whole rows are read into a buffer; of columns, too narrow for a system call each, the rows' pages are mapped and the
columns copied out of them, which is as fast as reading whole rows.
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
from penstock.weights.safetensors_file import ELEMENT_BITS, CheckpointError, StoredTensor

if TYPE_CHECKING:
    from penstock.kernels import Packer

PIECE_BYTES = 1 << 20  # enough to keep a disk busy, few enough to be in cache still when they are packed
DEVICE_PIECE_BYTES = 8 << 20  # of what is packed on a device: a copy and a few kernels each
PIECE_ROWS = 16  # pieces of larger tensors have a multiple of so many rows: whole blocks of packed weights
READERS = 8


@dataclass(frozen=True)
class Piece:
    """Of `count` rows of a stored tensor from row `first` on `width` bytes from byte `skip`, and where they go."""

    source: StoredTensor
    first: int
    count: int
    skip: int
    width: int
    packer: "Packer"
    target: int  # the row of the parameter that the first one becomes

    @property
    def bytes(self) -> int:
        return self.count * self.width

    @property
    def begin(self) -> int:
        """Of its first byte in the file."""
        return self.source.offset + self.first * self.source.row_bytes + self.skip

    @property
    def whole_rows(self) -> bool:
        """They lie together in the file."""
        return self.width == self.source.row_bytes


def pieces(
    parameters: Iterable[Parameter],
    tensors: Mapping[str, StoredTensor],
    packers: Mapping[str, Any],
    *,
    on_device: bool = False,
) -> Iterator[Piece]:
    """All of the parameters, by their names' packers."""
    size = DEVICE_PIECE_BYTES if on_device else PIECE_BYTES
    for parameter in parameters:
        for source in parameter.sources:
            stored = tensors[source.name]
            element = ELEMENT_BITS[stored.dtype] // 8
            skip, width = source.first_column * element, source.columns * element or stored.row_bytes
            count = size // width
            count = max(count // PIECE_ROWS * PIECE_ROWS, min(count, PIECE_ROWS), 1)
            for done in range(0, source.rows, count):
                rows, target = min(count, source.rows - done), source.start + done
                yield Piece(stored, source.first_row + done, rows, skip, width, packers[parameter.name], target)


def open_files(tensors: Mapping[str, StoredTensor], stack: ExitStack) -> dict[Path, int]:
    """Descriptors of the tensors' files, which the stack closes."""
    files = {}
    for path in sorted({tensor.path for tensor in tensors.values()}):
        files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stack.callback(os.close, files[path])
    return files


def read_piece(descriptor: int, target: NDArray[np.uint8], piece: Piece) -> None:
    """Fill `target`, of the piece's bytes."""
    if piece.whole_rows:
        _read_rows(descriptor, target, piece)
    else:
        _read_columns(descriptor, target, piece)


def _read_rows(descriptor: int, target: NDArray[np.uint8], piece: Piece) -> None:
    view, offset = target.data, piece.begin
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise _ended(piece, offset)
        view, offset = view[count:], offset + count


def _read_columns(descriptor: int, target: NDArray[np.uint8], piece: Piece) -> None:
    """A part of each row. To touch a page beyond the file's end would kill the process, so its size is looked at
    before."""
    stride, begin = piece.source.row_bytes, piece.begin
    end = begin + (piece.count - 1) * stride + piece.width
    if (size := os.fstat(descriptor).st_size) < end:
        raise _ended(piece, size)
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    shape = (piece.count, piece.width)
    with mmap.mmap(descriptor, end - start, prot=mmap.PROT_READ, offset=start) as pages:
        rows = np.ndarray(shape, np.uint8, buffer=pages, offset=begin - start, strides=(stride, 1))
        np.copyto(target.reshape(shape), rows)
        del rows  # a map that is still seen cannot be closed


def _ended(piece: Piece, offset: int) -> CheckpointError:
    return CheckpointError(f"{piece.source.path}: ended at byte {offset} while {piece.source.name!r} was read")
