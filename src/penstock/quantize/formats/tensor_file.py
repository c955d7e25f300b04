"""Writes files of tensors (safetensors and GGUF) in any order. The layout is computed first, from types and shapes.
Then each tensor is written at its offset as soon as it is quantised."""

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.families.checkpoint.stored import CheckpointError, StoredTensor
from penstock.gguf import TYPES

COPIED_AT_ONCE = 1 << 20  # bytes
GGUF_ALIGNMENT = 32


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of the file."""

    dtype: str  # as the file names it
    shape: tuple[int, ...]
    size: int  # bytes


@dataclass(frozen=True)
class FileLayout:
    """The header of a file, and where each tensor begins."""

    header: bytes
    offsets: Mapping[str, int]  # bytes from the start of the file, by name
    size: int  # bytes of the whole file


class TensorFile:
    """An open file. Tensors that were written are kept if the process is killed."""

    def __init__(self, path: Path, entries: Mapping[str, OutputTensor], layout: FileLayout) -> None:
        self._entries, self._layout = entries, layout
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._file, layout.size)
        self._write(layout.header, 0)

    def put(self, name: str, data: NDArray[Any], at: int = 0) -> None:
        """Writes a tensor, or the part of it that begins at its byte `at`. Raises ValueError if it is too long."""
        size = self._entries[name].size
        if at + data.nbytes > size:
            raise ValueError(f"{name}: {data.nbytes} bytes were made, and the file has a place for {size - at}")
        self._write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, self._layout.offsets[name] + at)

    def copy(self, name: str, tensor: StoredTensor) -> None:
        """Copies the bytes of a tensor from another file. Raises CheckpointError if that file has become shorter."""
        source = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for done in range(0, tensor.size, COPIED_AT_ONCE):
                wanted = min(COPIED_AT_ONCE, tensor.size - done)
                data = os.pread(source, wanted, tensor.offset + done)
                if len(data) < wanted:
                    raise CheckpointError(f"{tensor.path}: ended while {tensor.name!r} was read")
                self._write(data, self._layout.offsets[name] + done)
        finally:
            os.close(source)

    def close(self) -> None:
        """Closes the file once its content is on the disk."""
        os.fsync(self._file)
        os.close(self._file)

    def _write(self, data: Any, offset: int) -> None:
        view = memoryview(data)
        while view:
            count = os.pwrite(self._file, view, offset)
            view, offset = view[count:], offset + count


def safetensors_layout(entries: Mapping[str, OutputTensor]) -> FileLayout:
    """Returns the layout of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, offsets = 0, {}
    for name, entry in entries.items():
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + entry.size]}
        offsets[name] = at
        at += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    offsets = {name: start + offset for name, offset in offsets.items()}
    return FileLayout(struct.pack("<Q", len(text)) + text, offsets, start + at)


def gguf_layout(metadata: Mapping[str, tuple[int, bytes]], entries: Mapping[str, OutputTensor]) -> FileLayout:
    """Returns the layout of a GGUF file, version 3. `metadata` has each value's type number and bytes."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, (kind, data) in metadata.items():
        head += [_text(key), struct.pack("<I", kind), data]
    at, offsets = 0, {}
    for name, entry in entries.items():
        sizes = entry.shape[::-1] or (1,)
        head += [_text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        head.append(struct.pack("<IQ", TYPES[entry.dtype].number, at))
        offsets[name] = at
        at += -(-entry.size // GGUF_ALIGNMENT) * GGUF_ALIGNMENT
    header = b"".join(head)
    header += b"\0" * (-len(header) % GGUF_ALIGNMENT)
    offsets = {name: len(header) + offset for name, offset in offsets.items()}
    return FileLayout(header, offsets, len(header) + at)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
