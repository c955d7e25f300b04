"""Loads a model's parameters from disk: read in parallel, and packed as they come.

A rank of several reads only its own part. Native threads read the matrices of native kernels, and may have started
already (see matrices.py). Everything else is read here: vectors, columns, and all that torch's kernels use. For a
device, it is read into pinned memory and copied while more is read.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.config import format_bytes
from penstock.families.checkpoint.stored import CheckpointError, ReadPart, Rows, StoredTensor
from penstock.families.spec import ModelSpec, Parameter, TensorSource
from penstock.gguf import TYPES
from penstock.gguf.dequantize import dequantize as numpy_dequantize
from penstock.kernels import CodePacker, DensePacker, Packer, Packing, ScaledPacker
from penstock.kernels.coded_rows import CodedRows
from penstock.kernels.native import gguf_rows
from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.packer import NativePacking
from penstock.observe.progress import progress_bar
from penstock.weights.checkpoint import check_tensors, stored_tensors
from penstock.weights.matrices import MatrixReader
from penstock.weights.reads import READ_BYTES, READERS, PlannedRead, open_files, plan_reads, read_into, read_part
from penstock.weights.staging import DeviceStaging, HostStaging, Staging

LARGE = 10**9  # bytes of weights whose reading takes most of the start
FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # torch converts more slowly
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

logger = logging.getLogger(__name__)


def load_parameters(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    whole: ModelSpec | None = None,
    packing: Packing | None = None,
    device: torch.device | None = None,
    matrices: MatrixReader | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """The spec's parameters by name: vectors as tensors of `dtype`, or of float32 where Parameter says so, matrices as
    `packing` packs them (None: tensors too). Norm weights are as stored; the model adds `spec.norm_offset`.

    They are packed on `device` and stay there; None: on the CPU, by the readers. If `spec` is a rank's part, `whole` is
    the model's, which the checkpoint must match. `matrices` reads them already, with an equal `packing`; it is closed
    here. With `progress`, a bar is shown if stderr is a terminal.

    Everything is checked before memory is allocated: CheckpointError names missing, unexpected and misshapen tensors,
    and later those that cannot be quantised. Besides the result, each reader holds 1 MiB, or a row if that is more; for
    a device two buffers of 8 MiB, and some memory there.
    """
    began = time.perf_counter()
    ahead = 0.0 if matrices is None else began - matrices.began
    if matrices is None and isinstance(packing, NativePacking):
        matrices = MatrixReader(folder, spec, packing, whole=whole)
    tensors = stored_tensors(folder, whole or spec) if matrices is None else matrices.tensors
    with ExitStack() as stack:
        if matrices is None:
            check_tensors(whole or spec, tensors)
        else:
            stack.callback(matrices.close)
        files = open_files(tensors, stack)
        for name, original in spec.duplicates:
            if name in tensors:
                rows = [s for p in spec.parameters for s in p.sources if s.name == original]
                _check_duplicate(tensors[name], tensors[original], rows, files)
        native: Mapping[str, Packer] = {} if matrices is None else matrices.packers
        packers = {p.name: native.get(p.name) or _packer(p, dtype, packing, device) for p in spec.parameters}
        others = [parameter for parameter in spec.parameters if parameter.name not in native]
        here = list(plan_reads(others, tensors, packers, on_device=device is not None))
        if matrices is not None:
            here += matrices.unread
        total = sum(read.bytes for read in here) + (0 if matrices is None else matrices.bytes)
        with progress_bar(f"loading {folder.name}", total, wanted=progress, in_bytes=True) as advance:
            _read_all(here, files, advance, device)
            if matrices is not None:
                matrices.finish(advance)
    seconds = ahead + time.perf_counter() - began
    # A small model's time is that of the imports beside it: as a rate it would look like a slow disk.
    rate = f" ({total / 1e9 / seconds:.1f} GB/s)" if total >= LARGE else ""
    beside = ", while the engine started" if ahead else ""
    logger.info("read %s of weights from %s in %.1f s%s%s", format_bytes(total), folder.name, seconds, rate, beside)
    return {name: _finish(folder, name, packer) for name, packer in packers.items()}


def _packer(parameter: Parameter, dtype: torch.dtype, packing: Packing | None, device: torch.device | None) -> Packer:
    if packing is None or parameter.kind == "vector":
        return DensePacker(parameter.shape, torch.float32 if parameter.float32 else dtype, device)
    return packing(
        parameter.shape, parameter.kind, parameter.experts, parameter.sections, sensitive=parameter.sensitive
    )


def _finish(folder: Path, name: str, packer: Packer) -> Any:
    try:
        return packer.finish()
    except ValueError as error:
        raise CheckpointError(f"{folder}: {name}: {error}") from None


def _read_all(
    reads: list[PlannedRead], files: dict[Path, int], advance: Callable[[int], None], device: torch.device | None
) -> None:
    largest = max((read.bytes for read in reads), default=0)
    thread = threading.local()
    made: list[Staging] = []
    stream = None if device is None else torch.get_device_module(device).current_stream()

    def staging() -> Staging:
        """The buffers of the calling thread."""
        if not hasattr(thread, "staging"):
            thread.staging = HostStaging(largest) if device is None else DeviceStaging(largest, device, stream)
            made.append(thread.staging)
        own: Staging = thread.staging
        return own

    def perform(read: PlannedRead) -> None:
        source, own = read.source, staging()
        buffer = own.buffer(read.bytes)
        if not source.read_by_step:
            read_into(files, buffer.numpy(), read)
        rows, part = Rows(buffer.view(read.count, read.width).numpy()), ReadPart(*read.part, partial(read_part, files))
        for step in source.steps:
            rows = step(rows, part)
        try:
            _put(own, read, rows)
        except ValueError as error:
            raise CheckpointError(f"{source.path}: {source.name!r}: {error}") from None
        advance(read.bytes)

    several = sum(read.bytes for read in reads) > READ_BYTES
    with ThreadPoolExecutor(READERS if several else 1, "weights") as pool:
        futures = [pool.submit(perform, read) for read in reads]
        done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        for future in waiting:
            future.cancel()
        for future in done:
            future.result()
    for each in made:
        each.close()


def _put(own: Staging, read: PlannedRead, rows: Rows) -> None:
    """Gives rows [count, ...] to their packer: as codes if it holds such codes, else as floats."""
    dtype, packer = read.source.dtype, read.packer
    if rows.format is not None:
        assert rows.scales is not None
        if not np.isfinite(rows.scales).all():
            raise ValueError("its scales hold infinity or NaN")
        coded = CodedRows(rows.values, rows.scales, rows.mins, rows.format, rows.order)
        if isinstance(packer, CodePacker):
            packer.put_codes(read.target, coded)
        else:
            own.put(packer.put, read.target, torch.from_numpy(coded.values()))
        return
    values = torch.from_numpy(rows.values)
    scales = None if rows.scales is None else torch.from_numpy(rows.scales)
    if values.is_floating_point():
        own.put(packer.put, read.target, _shaped(values, read))
    elif dtype in DTYPES:
        own.put(packer.put, read.target, _shaped(values.view(-1).view(DTYPES[dtype]), read))
    elif scales is not None and isinstance(packer, ScaledPacker) and scales.shape[1] == 1 and not read.transposed:
        own.put(packer.put_scaled, read.target, values, scales.view(-1))
    elif scales is not None:
        wide = FP8_VALUES.index_select(0, values.reshape(-1).int()).view(values.shape) * scales
        own.put(packer.put, read.target, _shaped(wide, read))
    elif isinstance(packer, CodePacker):
        packer.put_stored(read.target, values, dtype)
    else:
        own.put(packer.put, read.target, _dequantized(values, dtype))


def _shaped(rows: torch.Tensor, read: PlannedRead) -> torch.Tensor:
    """The values of a read as rows of its parameter."""
    if not read.source.shape[1:]:
        return rows
    matrix = rows.view(read.count, -1)
    return matrix.T.contiguous() if read.transposed else matrix


def _dequantized(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rows of blocks, as a GGUF file has them, as fp32: for kernels that do not read them."""
    kind, (count, width) = TYPES[dtype], rows.shape
    columns = width // kind.block_bytes * kind.block_values
    dequantize = gguf_rows.dequantize if instruction_sets() else numpy_dequantize
    return torch.from_numpy(dequantize(kind.name, rows.numpy(), count, columns))


def _check_duplicate(
    copy: StoredTensor, original: StoredTensor, rows: Iterable[TensorSource], files: dict[Path, int]
) -> None:
    """Raise CheckpointError if a tied tensor that is stored twice differs, because only one copy is loaded. Only `rows`
    are compared: those that this rank loads."""
    same = copy.dtype == original.dtype and copy.shape == original.shape
    for source in rows if same else ():
        first, size = source.first_row * original.row_bytes, source.rows * original.row_bytes
        for start in range(first, first + size, READ_BYTES):
            count = min(READ_BYTES, first + size - start)
            same = same and os.pread(files[copy.path], count, copy.offset + start) == os.pread(
                files[original.path], count, original.offset + start
            )
    if not same:
        raise CheckpointError(
            f"config.json says that {copy.name} is tied to {original.name}, but the checkpoint holds both and they "
            'differ; write "tie_word_embeddings": false into config.json'
        )
