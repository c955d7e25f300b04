"""A file of tensors whose layout is known before its values: each tensor is written to its place when it is made."""

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
    """A tensor of the file that is made: its type as the file names it, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class FileLayout:
    """The first bytes of a file, and where each tensor begins."""

    header: bytes
    offsets: Mapping[str, int]
    size: int


class TensorFile:
    """Writes tensors in any order. What was written is still there if the process ends."""

    def __init__(self, path: Path, entries: Mapping[str, OutputTensor], layout: FileLayout) -> None:
        self._entries, self._layout = entries, layout
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._file, layout.size)
        self._write(layout.header, 0)

    def put(self, name: str, data: NDArray[Any], at: int = 0) -> None:
        """Writes a tensor, or the part of it that begins with its byte `at`."""
        size = self._entries[name].size
        if at + data.nbytes > size:
            raise ValueError(f"{name}: {data.nbytes} bytes were made, and the file has a place for {size - at}")
        self._write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, self._layout.offsets[name] + at)

    def copy(self, name: str, tensor: StoredTensor) -> None:
        """Writes a tensor as another file has it. Raises CheckpointError if that file has become shorter."""
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
    return FileLayout(
        struct.pack("<Q", len(text)) + text, {name: start + each for name, each in offsets.items()}, start + at
    )


def gguf_layout(metadata: Mapping[str, tuple[int, bytes]], entries: Mapping[str, OutputTensor]) -> FileLayout:
    """Returns the layout of a GGUF file, version 3. `metadata` has each value's type number and bytes."""
    head = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(metadata))]
    for key, (kind, data) in metadata.items():
        head += [_text(key), struct.pack("<I", kind), data]
    at, places = 0, {}
    for name, entry in entries.items():
        sizes = entry.shape[::-1] or (1,)
        head += [_text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        head.append(struct.pack("<IQ", TYPES[entry.dtype].number, at))
        places[name] = at
        at += -(-entry.size // GGUF_ALIGNMENT) * GGUF_ALIGNMENT
    header = b"".join(head)
    header += b"\0" * (-len(header) % GGUF_ALIGNMENT)
    return FileLayout(header, {name: len(header) + place for name, place in places.items()}, len(header) + at)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
