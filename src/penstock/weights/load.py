"""Weights from disk into what a model executes: read in parallel, by pieces, each packed where it belongs at once.

A rank of several reads its own part alone. Whole rows are read into a buffer; of columns, too narrow for a system call
each, the rows' pages are mapped and the columns copied out of them, which is as fast as reading whole rows. For a
device they are read into pinned memory and copied from there while the next ones are read.
"""

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.families.spec import ModelSpec, TensorSource
from penstock.kernels import DensePacker, Packer, Packing
from penstock.observe.progress import progress_bar
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.safetensors_file import CheckpointError, StoredTensor
from penstock.weights.staging import DeviceStaging, HostStaging, Staging

PIECE_BYTES = 1 << 20  # enough to keep a disk busy, few enough to be in cache still when they are packed
DEVICE_PIECE_BYTES = 8 << 20  # of what is packed on a device: a copy and a few kernels each
PIECE_ROWS = 16  # pieces of larger tensors have a multiple of so many rows: whole blocks of packed weights
READERS = 8
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Piece:
    """Of `count` rows of a stored tensor from row `first` on `width` bytes from byte `skip`, and where they go."""

    source: StoredTensor
    first: int
    count: int
    skip: int
    width: int
    packer: Packer
    target: int  # the row of the parameter that the first one becomes

    @property
    def bytes(self) -> int:
        return self.count * self.width

    @property
    def begin(self) -> int:
        """Of its first byte in the file."""
        return self.source.offset + self.first * self.source.row_bytes + self.skip


def load_parameters(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    of: ModelSpec | None = None,
    packing: Packing | None = None,
    device: torch.device | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """The spec's parameters by their names: vectors as tensors of `dtype`, matrices as `packing` makes them (None:
    tensors as well). They are packed on `device`, which `packing` is for, and stay there; None: by the readers, on the
    CPU. Where `spec` is a rank's part, `of` is the whole model, whose the checkpoint must be.

    All is verified before anything is allocated: CheckpointError names missing, unexpected and misshapen tensors.
    Beyond the result itself, memory holds a piece of 1 MiB, or of a row, for each reader; or for a device, two of 8 MiB
    here, and some there. What cannot be quantised is a CheckpointError as well. Norm weights are as stored:
    `spec.norm_offset` is added by the model. With `progress`, a bar is shown where stderr is a terminal.
    """
    began = time.perf_counter()
    tensors = stored_tensors(folder)
    check_tensors(of or spec, tensors)
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in sorted({tensor.path for tensor in tensors.values()})}
        for name, original in spec.duplicates:
            if name in tensors:
                rows = [s for p in spec.parameters for s in p.sources if s.name == original]
                _check_duplicate(tensors[name], tensors[original], rows, files)
        packers: dict[str, Packer] = {
            p.name: DensePacker(p.shape, dtype, device)
            if packing is None or p.kind == "vector"
            else packing(p.shape, p.kind, p.experts)
            for p in spec.parameters
        }
        pieces = list(_pieces(spec, tensors, packers, PIECE_BYTES if device is None else DEVICE_PIECE_BYTES))
        total = sum(piece.bytes for piece in pieces)
        with progress_bar(f"loading {folder.name}", total, wanted=progress, in_bytes=True) as advance:
            _read_all(pieces, files, advance, device)
    seconds = time.perf_counter() - began
    logger.info(
        "loaded %.2f GB of weights from %s in %.1f s (%.2f GB/s)", total / 1e9, folder, seconds, total / 1e9 / seconds
    )
    return {name: _finish(folder, name, packer) for name, packer in packers.items()}


def _finish(folder: Path, name: str, packer: Packer) -> Any:
    try:
        return packer.finish()
    except ValueError as error:
        raise CheckpointError(f"{folder}: {name}: {error}") from None


def _open(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _pieces(
    spec: ModelSpec, tensors: Mapping[str, StoredTensor], packers: Mapping[str, Packer], size: int
) -> Iterator[_Piece]:
    """Of about `size` bytes each."""
    for parameter in spec.parameters:
        for source in parameter.sources:
            stored = tensors[source.name]
            element = DTYPES[stored.dtype].itemsize
            skip, width = source.first_column * element, source.columns * element or stored.row_bytes
            count = size // width
            count = max(count // PIECE_ROWS * PIECE_ROWS, min(count, PIECE_ROWS), 1)
            for done in range(0, source.rows, count):
                rows, target = min(count, source.rows - done), source.start + done
                yield _Piece(stored, source.first_row + done, rows, skip, width, packers[parameter.name], target)


def _read_all(
    pieces: list[_Piece], files: dict[Path, int], advance: Callable[[int], None], device: torch.device | None
) -> None:
    largest = max((piece.bytes for piece in pieces), default=0)
    readers = threading.local()
    made: list[Staging] = []
    stream = None if device is None else torch.get_device_module(device).current_stream()

    def staging() -> Staging:
        """The calling reader's."""
        if not hasattr(readers, "staging"):
            readers.staging = HostStaging(largest) if device is None else DeviceStaging(largest, device, stream)
            made.append(readers.staging)
        own: Staging = readers.staging
        return own

    def read(piece: _Piece) -> None:
        source, own = piece.source, staging()
        buffer = own.buffer(piece.bytes)
        if piece.width == source.row_bytes:
            _read_rows(files[source.path], buffer.numpy(), piece)
        else:
            _read_columns(files[source.path], buffer.numpy(), piece)
        rows = buffer.view(DTYPES[source.dtype])
        try:
            own.put(piece.packer, piece.target, rows.view(piece.count, -1) if source.shape[1:] else rows)
        except ValueError as error:
            raise CheckpointError(f"{source.path}: {source.name!r}: {error}") from None
        advance(piece.bytes)

    with ThreadPoolExecutor(READERS, "weights") as pool:
        futures = [pool.submit(read, piece) for piece in pieces]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            future.result()
    for each in made:
        each.close()


def _read_rows(descriptor: int, target: NDArray[np.uint8], piece: _Piece) -> None:
    """Fill `target` with whole rows, which lie together in the file."""
    view, offset = target.data, piece.begin
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise _ended(piece, offset)
        view, offset = view[count:], offset + count


def _read_columns(descriptor: int, target: NDArray[np.uint8], piece: _Piece) -> None:
    """Fill `target` with a part of each row. To touch a page beyond the file's end would kill the process, so its size
    is looked at before."""
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


def _ended(piece: _Piece, offset: int) -> CheckpointError:
    return CheckpointError(f"{piece.source.path}: ended at byte {offset} while {piece.source.name!r} was read")


def _check_duplicate(
    copy: StoredTensor, original: StoredTensor, rows: Iterable[TensorSource], files: dict[Path, int]
) -> None:
    """A tied tensor that the checkpoint stores twice must be the same twice: only one of the two is kept. Compared are
    the rows that this rank keeps."""
    same = copy.dtype == original.dtype and copy.shape == original.shape
    for source in rows if same else ():
        first, size = source.first_row * original.row_bytes, source.rows * original.row_bytes
        for start in range(first, first + size, PIECE_BYTES):
            count = min(PIECE_BYTES, first + size - start)
            same = same and os.pread(files[copy.path], count, copy.offset + start) == os.pread(
                files[original.path], count, original.offset + start
            )
    if not same:
        raise CheckpointError(
            f"config.json says that {copy.name} is tied to {original.name}, but the checkpoint holds both and they "
            'differ; write "tie_word_embeddings": false into config.json'
        )
