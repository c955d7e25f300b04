"""Checks an ONNX file before onnxruntime reads it. Needs no package for ONNX: it walks the protobuf message.

Source of the field numbers: onnx.proto of the ONNX project.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

from penstock.repository.backend.files import HostileFile, inside

MAX_DEPTH = 64  # of nested messages
MAX_FIELDS = 20_000_000  # of a file, which take some ten seconds
_VARINT_BYTES = 10
_EXTERNAL = 13  # TensorProto.external_data: entries of key and value

# The fields that may hold a TensorProto, by message.
_TENSOR: dict[int, "dict[int, object]"] = {}
_SPARSE = {1: _TENSOR, 2: _TENSOR}
_ATTRIBUTE: dict[int, dict[int, object]] = {}
_NODE = {5: _ATTRIBUTE}
_GRAPH = {1: _NODE, 5: _TENSOR, 15: _SPARSE}
_FUNCTION = {7: _NODE, 11: _ATTRIBUTE}
_ATTRIBUTE.update({5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE})  # type: ignore[dict-item]
_MODEL = {7: _GRAPH, 25: _FUNCTION}


def check_onnx(path: Path, root: Path) -> None:
    """Raises HostileFile if a model names data outside `root`, is nested too deeply, or cannot be read.

    `path` must be a file in `root` after links are followed.
    """
    inside(path, root)
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise HostileFile(f"{path.name} is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            walk = _OnnxWalk(data)
            walk.message(0, len(data), _MODEL, 0)
    for location in walk.locations:
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise HostileFile(f"the model names data at {location[:200]!r}, outside its folder")
        inside(path.parent / location, root)


class _OnnxWalk:
    """Finds the places of external data."""

    def __init__(self, data: mmap.mmap) -> None:
        self.locations: set[str] = set()
        self._data = data
        self._fields = 0

    def message(self, at: int, end: int, kinds: dict[int, dict[int, object]], depth: int) -> None:
        if depth > MAX_DEPTH:
            raise HostileFile(f"messages are nested more than {MAX_DEPTH} deep")
        for number, start, stop in self._lengths(at, end):
            if kinds is _TENSOR and number == _EXTERNAL:
                self._external(start, stop)
            elif (kind := kinds.get(number)) is not None:
                self.message(start, stop, kind, depth + 1)  # type: ignore[arg-type]

    def _external(self, at: int, end: int) -> None:
        parts = {number: bytes(self._data[start:stop]) for number, start, stop in self._lengths(at, end)}
        if parts.get(1) == b"location":
            self.locations.add(parts.get(2, b"").decode("utf-8", "replace"))

    def _lengths(self, at: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The fields with a length: number, start and end of the content. Others are skipped."""
        while at < end:
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise HostileFile(f"the model has more than {MAX_FIELDS} fields")
            tag, at = self._varint(at, end)
            match tag & 7:
                case 0:
                    _, at = self._varint(at, end)
                case 1:
                    at += 8
                case 5:
                    at += 4
                case 2:
                    size, at = self._varint(at, end)
                    if at + size > end:
                        raise HostileFile("the file is cut off, or is no ONNX model")
                    yield tag >> 3, at, at + size
                    at += size
                case _:
                    raise HostileFile("the file is no ONNX model")
        if at > end:
            raise HostileFile("the file is cut off, or is no ONNX model")

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = 0
        for i in range(_VARINT_BYTES):
            if at + i >= end:
                break
            byte = self._data[at + i]
            value |= (byte & 127) << 7 * i
            if byte < 128:
                return value, at + i + 1
        raise HostileFile("the file is cut off, or is no ONNX model")
