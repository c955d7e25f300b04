"""Weights from disk into what a model executes: read in parallel, by pieces, each packed where it belongs at once."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.families.spec import ModelSpec
from penstock.kernels import DensePacker, Packer, Packing
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.safetensors_file import CheckpointError, StoredTensor

PIECE_BYTES = 1 << 20  # enough to keep a disk busy, few enough to be in cache still when they are packed
PIECE_ROWS = 16  # pieces of larger tensors have a multiple of so many rows: whole blocks of packed weights
READERS = 8
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Piece:
    """`count` rows of a stored tensor from row `first` on, and where they go."""

    source: StoredTensor
    first: int
    count: int
    packer: Packer
    target: int  # the row of the parameter that the first one becomes

    @property
    def row_bytes(self) -> int:
        return self.source.size // self.source.shape[0]

    @property
    def bytes(self) -> int:
        return self.count * self.row_bytes


def load_parameters(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, *, packing: Packing | None = None, progress: bool = True
) -> dict[str, Any]:
    """The spec's parameters by their names, on the CPU: vectors as tensors of `dtype`, matrices as `packing` makes them
    (None: tensors as well).

    All is verified before anything is allocated: CheckpointError names missing, unexpected and misshapen tensors.
    Beyond the result itself, memory holds a piece of 1 MiB, or of a row, for each reader. Norm weights are as stored:
    `spec.norm_offset` is added by the model. With `progress`, a bar is shown where stderr is a terminal.
    """
    began = time.perf_counter()
    tensors = stored_tensors(folder)
    check_tensors(spec, tensors)
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in sorted({tensor.path for tensor in tensors.values()})}
        for name, original in spec.duplicates:
            if name in tensors:
                _check_duplicate(tensors[name], tensors[original], files)
        packers: dict[str, Packer] = {
            p.name: DensePacker(p.shape, dtype) if packing is None or p.kind == "vector" else packing(p.shape, p.kind)
            for p in spec.parameters
        }
        pieces = list(_pieces(spec, tensors, packers))
        total = sum(piece.bytes for piece in pieces)
        with _progress_bar(folder.name, total, progress) as advance:
            _read_all(pieces, files, advance)
    seconds = time.perf_counter() - began
    logger.info(
        "loaded %.2f GB of weights from %s in %.1f s (%.2f GB/s)", total / 1e9, folder, seconds, total / 1e9 / seconds
    )
    return {name: packer.finish() for name, packer in packers.items()}


def _open(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _pieces(spec: ModelSpec, tensors: Mapping[str, StoredTensor], packers: Mapping[str, Packer]) -> Iterator[_Piece]:
    for parameter in spec.parameters:
        for source in parameter.sources:
            stored = tensors[source.name]
            count = PIECE_BYTES * source.rows // stored.size
            count = max(count // PIECE_ROWS * PIECE_ROWS, min(count, PIECE_ROWS), 1)
            for first in range(0, source.rows, count):
                rows = min(count, source.rows - first)
                yield _Piece(stored, first, rows, packers[parameter.name], source.start + first)


def _read_all(pieces: list[_Piece], files: dict[Path, int], advance: Callable[[int], None]) -> None:
    largest = max((piece.bytes for piece in pieces), default=0)
    staging = threading.local()  # one buffer per reader

    def read(piece: _Piece) -> None:
        if not hasattr(staging, "buffer"):
            staging.buffer = torch.empty(largest, dtype=torch.uint8)
        source = piece.source
        rows = staging.buffer[: piece.bytes].view(DTYPES[source.dtype]).view(piece.count, *source.shape[1:])
        _read_into(files[source.path], rows, source.offset + piece.first * piece.row_bytes, source)
        try:
            piece.packer.put(piece.target, rows)
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


def _read_into(descriptor: int, target: torch.Tensor, offset: int, source: StoredTensor) -> None:
    """Fill a contiguous tensor from the file."""
    view = target.view(-1).view(torch.uint8).numpy().data
    while view:
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise CheckpointError(f"{source.path}: ended at byte {offset} while {source.name!r} was read")
        view, offset = view[count:], offset + count


def _check_duplicate(copy: StoredTensor, original: StoredTensor, files: dict[Path, int]) -> None:
    """A tied tensor that the checkpoint stores twice must be the same twice: only one of the two is kept."""
    same = copy.dtype == original.dtype and copy.shape == original.shape
    for start in range(0, copy.size if same else 0, PIECE_BYTES):
        count = min(PIECE_BYTES, copy.size - start)
        same = same and os.pread(files[copy.path], count, copy.offset + start) == os.pread(
            files[original.path], count, original.offset + start
        )
    if not same:
        raise CheckpointError(
            f"config.json says that {copy.name} is tied to {original.name}, but the checkpoint holds both and they "
            'differ; write "tie_word_embeddings": false into config.json'
        )


@contextmanager
def _progress_bar(label: str, total: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes read, from any thread."""
    if not wanted or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)
