"""Weights from disk into the tensors a model executes, by parallel reads straight to their final place."""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.families.spec import ModelSpec
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.safetensors_file import CheckpointError, StoredTensor

PIECE_BYTES = 16 << 20  # large enough to keep a disk busy, small enough to spread one tensor over the readers
READERS = 8
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Piece:
    """Elements `start` to `stop` of a stored tensor, and the equally long flat tensor they go to."""

    source: StoredTensor
    start: int
    stop: int
    target: torch.Tensor


def load_parameters(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, *, progress: bool = True
) -> dict[str, torch.Tensor]:
    """The spec's parameters by their names, in `dtype`, on the CPU.

    All is verified before anything is allocated: CheckpointError names missing, unexpected and misshapen tensors.
    Beyond the result itself, memory holds a few pieces of 16 MiB, and these only where the checkpoint has another
    dtype. Norm weights are as stored: `spec.norm_offset` is added by the model. With `progress`, a bar is shown where
    stderr is a terminal.
    """
    began = time.perf_counter()
    tensors = stored_tensors(folder)
    check_tensors(spec, tensors)
    with ExitStack() as stack:
        files = {path: _open(path, stack) for path in sorted({tensor.path for tensor in tensors.values()})}
        for name, original in spec.duplicates:
            if name in tensors:
                _check_duplicate(tensors[name], tensors[original], files)
        parameters = {parameter.name: torch.empty(parameter.shape, dtype=dtype) for parameter in spec.parameters}
        pieces = list(_pieces(spec, tensors, parameters))
        total = sum(_stored_bytes(piece) for piece in pieces)
        with _progress_bar(folder.name, total, progress) as advance:
            _read_all(pieces, files, advance)
    seconds = time.perf_counter() - began
    logger.info(
        "loaded %.2f GB of weights from %s in %.1f s (%.2f GB/s)", total / 1e9, folder, seconds, total / 1e9 / seconds
    )
    return parameters


def _open(path: Path, stack: ExitStack) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor


def _pieces(spec: ModelSpec, tensors: dict[str, StoredTensor], parameters: dict[str, torch.Tensor]) -> Iterator[_Piece]:
    for parameter in spec.parameters:
        for source in parameter.sources:
            stored = tensors[source.name]
            target = parameters[parameter.name][source.start : source.start + source.rows].view(-1)
            step = PIECE_BYTES // DTYPES[stored.dtype].itemsize
            for start in range(0, target.numel(), step):
                stop = min(start + step, target.numel())
                yield _Piece(stored, start, stop, target[start:stop])


def _stored_bytes(piece: _Piece) -> int:
    return (piece.stop - piece.start) * DTYPES[piece.source.dtype].itemsize


def _read_all(pieces: list[_Piece], files: dict[Path, int], advance: Callable[[int], None]) -> None:
    staging = threading.local()  # one buffer per reader, for pieces that are converted

    def read(piece: _Piece) -> None:
        stored = DTYPES[piece.source.dtype]
        offset = piece.source.offset + piece.start * stored.itemsize
        descriptor = files[piece.source.path]
        if piece.target.dtype == stored:
            _read_into(descriptor, piece.target, offset, piece.source)
        else:
            if not hasattr(staging, "buffer"):
                staging.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            buffer = staging.buffer[: _stored_bytes(piece)].view(stored)
            _read_into(descriptor, buffer, offset, piece.source)
            piece.target.copy_(buffer)
        advance(_stored_bytes(piece))

    with ThreadPoolExecutor(READERS, "weights") as pool:
        futures = [pool.submit(read, piece) for piece in pieces]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            future.result()


def _read_into(descriptor: int, target: torch.Tensor, offset: int, source: StoredTensor) -> None:
    """Fill a flat contiguous tensor from the file."""
    view = target.view(torch.uint8).numpy().data
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
