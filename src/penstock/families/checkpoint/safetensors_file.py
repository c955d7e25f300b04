"""The header of a safetensors file: eight bytes of length, a JSON object, then the tensors' bytes without gaps.

Files are untrusted: every number in the header is checked against the file's size.
"""

import math
import os
from pathlib import Path
from typing import Any, TypeGuard

from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.gguf import describe_other
from penstock.gguf.json_file import parse_json_object

MAX_HEADER_BYTES = 100_000_000  # the format's own limit

ELEMENT_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_SMALL = 8  # values of less than a byte that fill whole bytes together


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises CheckpointError if the file does not match its header."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = 8 + int.from_bytes(file.read(8), "little")
            if (size < 8 or start > min(size, 8 + MAX_HEADER_BYTES)) and (other := describe_other(path)):
                raise CheckpointError(f"{path} is {other}")
            if size < 8 or start > min(size, 8 + MAX_HEADER_BYTES):
                raise CheckpointError(
                    f"{path}: not a safetensors file, or truncated: its {size} bytes cannot hold the {start - 8} bytes "
                    "of header it announces; download it again"
                )
            data = file.read(start - 8)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        header = parse_json_object(data, f"{path}: header")
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    header.pop("__metadata__", None)
    tensors = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    _check_layout(path, tensors, start, size)
    return tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: header: tensor {name!r} is not described by an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ELEMENT_BITS:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not _is_sizes(shape):
        raise CheckpointError(f"{path}: tensor {name!r} has no valid shape: {str(shape)[:80]}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: tensor {name!r} has no valid data_offsets: {str(offsets)[:80]}")
    begin, end = offsets
    bits = math.prod(shape) * ELEMENT_BITS[dtype]
    if bits != 8 * (end - begin):
        raise CheckpointError(
            f"{path}: tensor {name!r}, {dtype} {str(shape)[:80]}, does not fit its data_offsets: {begin} to {end}"
        )
    size = ELEMENT_BITS[dtype]
    block = (1, size // 8) if size >= 8 else (_SMALL, size * _SMALL // 8)
    return StoredTensor(name, path, dtype, tuple(shape), start + begin, end - begin, block)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """The tensors cover the rest of the file, one after the other."""
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size)):
        if tensor.offset != end:
            what = (
                "overlaps the one before it" if tensor.offset < end else "does not begin where the one before it ends"
            )
            raise CheckpointError(f"{path}: tensor {tensor.name!r} {what}")
        end = tensor.offset + tensor.size
        if end > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {tensor.name!r} ends at byte {end} of {size}; download the file again"
            )
    if end != size:
        raise CheckpointError(f"{path}: {size - end} bytes after the last tensor belong to none")
