"""Weights from disk into what a model executes: read in parallel, by pieces, each packed where it belongs at once.

A rank of several reads its own part alone. What native kernels read is read by native threads, which may have begun
before (see matrices.py), and the rest here: vectors, columns, all of torch's. For a device it is read into pinned
memory and copied from there while more is read.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from penstock.families.spec import ModelSpec, Parameter, TensorSource
from penstock.kernels import DensePacker, Packer, Packing
from penstock.kernels.native.packer import NativePacking
from penstock.observe.progress import progress_bar
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.matrices import MatrixReader
from penstock.weights.pieces import PIECE_BYTES, READERS, Piece, open_files, pieces, read_piece
from penstock.weights.safetensors_file import CheckpointError, StoredTensor
from penstock.weights.staging import DeviceStaging, HostStaging, Staging

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

logger = logging.getLogger(__name__)


def load_parameters(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    of: ModelSpec | None = None,
    packing: Packing | None = None,
    device: torch.device | None = None,
    matrices: MatrixReader | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """The spec's parameters by their names: vectors as tensors of `dtype`, matrices as `packing` makes them (None:
    tensors as well). They are packed on `device`, which `packing` is for, and stay there; None: by the readers, on the
    CPU. Where `spec` is a rank's part, `of` is the whole model, whose the checkpoint must be. `matrices` are being read
    already, by a `packing` like this one; they are closed here.

    All is verified before anything is allocated: CheckpointError names missing, unexpected and misshapen tensors.
    Beyond the result itself, memory holds a piece of 1 MiB, or of a row, for each reader; or for a device, two of 8 MiB
    here, and some there. What cannot be quantised is a CheckpointError as well. Norm weights are as stored:
    `spec.norm_offset` is added by the model. With `progress`, a bar is shown where stderr is a terminal.
    """
    began = time.perf_counter()
    ahead = 0.0 if matrices is None else began - matrices.began
    if matrices is None and isinstance(packing, NativePacking):
        matrices = MatrixReader(folder, spec, packing, of=of)
    tensors = stored_tensors(folder) if matrices is None else matrices.tensors
    with ExitStack() as stack:
        if matrices is None:
            check_tensors(of or spec, tensors)
        else:
            stack.callback(matrices.close)
        files = open_files(tensors, stack)
        for name, original in spec.duplicates:
            if name in tensors:
                rows = [s for p in spec.parameters for s in p.sources if s.name == original]
                _check_duplicate(tensors[name], tensors[original], rows, files)
        begun: Mapping[str, Packer] = {} if matrices is None else matrices.packers
        packers = {p.name: begun.get(p.name) or _packer(p, dtype, packing, device) for p in spec.parameters}
        others = [parameter for parameter in spec.parameters if parameter.name not in begun]
        here = list(pieces(others, tensors, packers, on_device=device is not None))
        total = sum(piece.bytes for piece in here)
        if matrices is not None:
            here += matrices.left
            total += matrices.bytes + sum(piece.bytes for piece in matrices.left)
        with progress_bar(f"loading {folder.name}", total, wanted=progress, in_bytes=True) as advance:
            _read_all(here, files, advance, device)
            if matrices is not None:
                matrices.finish(advance)
    seconds = ahead + time.perf_counter() - began
    logger.info(
        "loaded %.2f GB of weights from %s in %.1f s (%.2f GB/s)%s",
        total / 1e9,
        folder,
        seconds,
        total / 1e9 / seconds,
        f", {ahead:.1f} s of them beside imports" if ahead else "",
    )
    return {name: _finish(folder, name, packer) for name, packer in packers.items()}


def _packer(parameter: Parameter, dtype: torch.dtype, packing: Packing | None, device: torch.device | None) -> Packer:
    if packing is None or parameter.kind == "vector":
        return DensePacker(parameter.shape, dtype, device)
    return packing(parameter.shape, parameter.kind, parameter.experts)


def _finish(folder: Path, name: str, packer: Packer) -> Any:
    try:
        return packer.finish()
    except ValueError as error:
        raise CheckpointError(f"{folder}: {name}: {error}") from None


def _read_all(
    wanted: list[Piece], files: dict[Path, int], advance: Callable[[int], None], device: torch.device | None
) -> None:
    largest = max((piece.bytes for piece in wanted), default=0)
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

    def read(piece: Piece) -> None:
        source, own = piece.source, staging()
        buffer = own.buffer(piece.bytes)
        read_piece(files[source.path], buffer.numpy(), piece)
        rows = buffer.view(DTYPES[source.dtype])
        try:
            own.put(piece.packer, piece.target, rows.view(piece.count, -1) if source.shape[1:] else rows)
        except ValueError as error:
            raise CheckpointError(f"{source.path}: {source.name!r}: {error}") from None
        advance(piece.bytes)

    several = sum(piece.bytes for piece in wanted) > PIECE_BYTES
    with ThreadPoolExecutor(READERS if several else 1, "weights") as pool:
        futures = [pool.submit(read, piece) for piece in wanted]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            future.result()
    for each in made:
        each.close()


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
