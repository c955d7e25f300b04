"""GGUF files made by hand, right and wrong."""

import struct
from collections.abc import Sequence
from pathlib import Path

NUMBER = struct.Struct("<I")
LENGTH = struct.Struct("<Q")


def raw_string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return LENGTH.pack(len(data)) + data


def raw_key(name: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata entry of value type `kind`."""
    return raw_string(name) + NUMBER.pack(kind) + value


def raw_tensor(name: str, dimensions: Sequence[int], kind: int, offset: int) -> bytes:
    """An entry of the table of tensors. `dimensions` are in the file's order, a row's length first."""
    sizes = b"".join(LENGTH.pack(size) for size in dimensions)
    return raw_string(name) + NUMBER.pack(len(dimensions)) + sizes + NUMBER.pack(kind) + LENGTH.pack(offset)


def raw_file(
    folder: Path,
    *,
    keys: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    magic: bytes = b"GGUF",
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> Path:
    """A file of these entries, with `data` from the next multiple of 32 bytes. The counts are what it announces."""
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    head = magic + NUMBER.pack(version) + struct.pack("<QQ", *counts) + b"".join(keys) + b"".join(tensors)
    path = folder / "raw.gguf"
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path
