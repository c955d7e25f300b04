"""The header of one GGUF file, version 2 or 3: metadata and the table of tensors.

Source: docs/gguf.md of the ggml project. Files are untrusted: every count, length and offset is checked against the
file's size before anything is read or allocated.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from penstock.gguf.other_files import describe_other
from penstock.gguf.types import OTHER_NAMES, TYPES_BY_NUMBER, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 10  # of a key and of a tensor's name; the format allows 64 for a tensor
MAX_VALUES = 4 << 20  # of all metadata; the largest vocabularies have 1.4 million tokens, scores, types and merges
MAX_TEXT_BYTES = 256 << 20  # of all strings
MAX_DEPTH = 4  # of arrays in arrays
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_STRING: Final = 8
_ARRAY: Final = 9
_BOOL: Final = 7
# struct's codes of the fixed-size value types; a bool is a byte
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_LEAST_BYTES = {**{kind: struct.calcsize(code) for kind, code in _CODES.items()}, _STRING: 8, _ARRAY: 12}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FIXED_BYTES = 24  # magic, version, counts


class GgufError(ValueError):
    """The file is broken, or not of a kind that is read; the message names the file, the value and the limit."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a file: `size` bytes from `offset` of `path`, row-major: the shape's last dimension is a row's."""

    name: str
    path: Path
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """The metadata and the tensors of one file. Callers share it: they must not change it."""

    path: Path
    metadata: dict[str, Any]  # bool, int, float, str, or a list of these or of lists
    tensors: dict[str, GgufTensor]


def read_header(path: Path) -> Header:
    """The header of a file. Raises GgufError, also if the file cannot be read."""
    try:
        if not path.is_file():
            raise GgufError(f"{path}: {'not a file' if path.exists() else 'there is no such file'}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(MAGIC)) != MAGIC and (other := describe_other(path)):
                raise GgufError(f"{path} is {other}")
            if size < _FIXED_BYTES:
                raise GgufError(f"{path}: not a GGUF file, or truncated: {size} bytes; the smallest has {_FIXED_BYTES}")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).header()
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_floats(tensor: GgufTensor) -> tuple[float, ...]:
    """The values of a small tensor of type F32. Raises GgufError if the file has become shorter."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        data = file.read(tensor.size)
    if len(data) < tensor.size:
        raise GgufError(f"{tensor.path}: ended while {short(tensor.name)} was read")
    return struct.unpack(f"<{tensor.size // 4}f", data)


class _Parser:
    """Reads a header from front to back. `at` is the offset of the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0
        self.values = 0  # of metadata so far
        self.text_bytes = 0

    def header(self) -> Header:
        self._check_version()
        tensor_count, key_count = self._number(_U64, "tensor count"), self._number(_U64, "metadata count")
        self._limit("tensors", tensor_count, MAX_TENSORS, least_bytes=24)
        self._limit("metadata keys", key_count, MAX_KEYS, least_bytes=13)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._name("a metadata key")
            if key in metadata:
                raise self._error(f"metadata key {short(key)} appears twice")
            what = f"metadata {short(key)}"
            metadata[key] = self._value(self._number(_U32, what), what)
        alignment = self._alignment(metadata)
        entries = [self._tensor_info() for _ in range(tensor_count)]
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for entry in entries:
            if entry[0] in tensors:
                raise self._error(f"tensor {short(entry[0])} appears twice")
            tensors[entry[0]] = self._tensor(*entry, start, alignment)
        self._check_overlaps(list(tensors.values()))
        return Header(self.path, metadata, tensors)

    def _check_version(self) -> None:
        magic = self.data[:4]
        if magic != MAGIC:
            raise self._error(f"not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
        self.at = 4
        version = self._number(_U32, "version")
        if version in VERSIONS:
            return
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise self._error("big-endian, which is not supported: convert it to little-endian (gguf_convert_endian)")
        raise self._error(f"GGUF version {version} is not supported; supported: 2 and 3. Convert the model again")

    def _value(self, kind: int, what: str, depth: int = 0) -> Any:
        """A value of type number `kind`. `what` names it in errors."""
        if kind == _STRING:
            return self._strings(1, what)[0]
        if kind != _ARRAY:
            return self._numbers(kind, 1, what)[0]
        if depth == MAX_DEPTH:
            raise self._error(f"{what} has arrays nested deeper than {MAX_DEPTH}")
        kind, count = self._number(_U32, what), self._number(_U64, what)
        if kind not in _LEAST_BYTES:
            raise self._unknown(kind, what)
        if count * _LEAST_BYTES[kind] > self.size - self.at:
            raise self._truncated(f"{what}, an array of {count} values,")
        if kind == _ARRAY:
            self._count_values(count, what)
            return [self._value(_ARRAY, what, depth + 1) for _ in range(count)]
        return self._strings(count, what) if kind == _STRING else self._numbers(kind, count, what)

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _CODES:
            raise self._unknown(kind, what)
        self._count_values(count, what)
        layout = f"<{count}{_CODES[kind]}"
        end = self.at + struct.calcsize(layout)
        if end > self.size:
            raise self._truncated(what)
        numbers = list(struct.unpack_from(layout, self.data, self.at))
        self.at = end
        if kind != _BOOL:
            return numbers
        if any(number > 1 for number in numbers):
            raise self._error(f"{what} is {max(numbers)}; a bool is 0 or 1")
        return [number == 1 for number in numbers]

    def _strings(self, count: int, what: str) -> list[str]:
        """`count` strings. Vocabularies have hundreds of thousands: the loop has no call of ours."""
        self._count_values(count, what)
        data, at, size, length_of = self.data, self.at, self.size, _U64.unpack_from
        result, began = [], at
        limit = min(size, at + 8 * count + MAX_TEXT_BYTES - self.text_bytes)
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_of(data, at)[0]
                if at > limit:
                    break
                result.append(data[start:at].decode())
        except struct.error:
            raise self._truncated(what) from None
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8 at byte {start + error.start}: {error.reason}") from None
        if at > size:
            raise self._truncated(f"{what}, with a string of {at - start} bytes,")
        if at > limit:
            raise self._error(f"{what} has too much text: all strings may have {MAX_TEXT_BYTES} bytes")
        self.text_bytes += at - began - 8 * count
        self.at = at
        return result

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, number of the type, offset in the data section)."""
        name = self._name("a tensor's name")
        what = f"tensor {short(name)}"
        count = self._number(_U32, what)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._error(f"{what} has {count} dimensions; expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number(_U64, what) for _ in range(count)]))
        return name, shape, self._number(_U32, what), self._number(_U64, what)

    def _tensor(
        self, name: str, shape: tuple[int, ...], number: int, offset: int, start: int, alignment: int
    ) -> GgufTensor:
        what = f"tensor {short(name)}"
        kind = TYPES_BY_NUMBER.get(number)
        if kind is None:
            known = f"{number} ({OTHER_NAMES[number]})" if number in OTHER_NAMES else f"{number}"
            supported = ", ".join(kind.name for kind in TYPES_BY_NUMBER.values())
            raise self._error(f"{what} has type {known}, which is not supported; supported: {supported}")
        if 0 in shape:
            raise self._error(f"{what} is empty: shape {list(shape)}")
        if shape[-1] % kind.block_values:
            raise self._error(
                f"{what} has rows of {shape[-1]} values; {kind.name} needs a multiple of {kind.block_values}"
            )
        if offset % alignment:
            raise self._error(f"{what} is at offset {offset}, which is not a multiple of the alignment {alignment}")
        size = math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
        end = start + offset + size
        if end > self.size:
            raise self._error(
                f"truncated, or a wrong header: {what}, {kind.name} {list(shape)}, ends at byte {end} "
                f"of {self.size}; download the file again"
            )
        return GgufTensor(name, self.path, kind, shape, start + offset, size)

    def _check_overlaps(self, tensors: list[GgufTensor]) -> None:
        tensors.sort(key=lambda tensor: (tensor.offset, tensor.size))
        for before, tensor in pairwise(tensors):
            if tensor.offset < before.offset + before.size:
                raise self._error(
                    f"tensor {short(tensor.name)} at byte {tensor.offset} overlaps {short(before.name)}, which ends at "
                    f"byte {before.offset + before.size}"
                )

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(value) is not int or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._error(f"general.alignment is {short(value)}; expected a power of two up to {MAX_ALIGNMENT}")
        return value

    def _name(self, what: str) -> str:
        length = self._number(_U64, what)
        if not 1 <= length <= MAX_NAME_BYTES:
            raise self._error(f"{what} at byte {self.at} has {length} bytes; expected 1 to {MAX_NAME_BYTES}")
        if self.at + length > self.size:
            raise self._truncated(what)
        name = self.data[self.at : self.at + length]
        self.at += length
        try:
            return name.decode()
        except UnicodeDecodeError:
            raise self._error(f"{what}, {short(name)}, is not UTF-8") from None

    def _number(self, layout: struct.Struct, what: str) -> int:
        if self.at + layout.size > self.size:
            raise self._truncated(what)
        number: int = layout.unpack_from(self.data, self.at)[0]
        self.at += layout.size
        return number

    def _limit(self, what: str, count: int, most: int, *, least_bytes: int) -> None:
        """Raises GgufError if the header announces more entries than are allowed, or than the file can hold."""
        if count > most:
            raise self._error(f"{count} {what}, more than the {most} allowed")
        if count * least_bytes > self.size:
            raise self._error(f"truncated: {self.size} bytes cannot hold {count} {what}; download the file again")

    def _count_values(self, count: int, what: str) -> None:
        self.values += count
        if self.values > MAX_VALUES:
            raise self._error(f"{what} has {count} values; all metadata may have {MAX_VALUES}")

    def _unknown(self, kind: int, what: str) -> GgufError:
        return self._error(f"{what} has the unknown value type {kind}; expected 0 to 12")

    def _truncated(self, what: str) -> GgufError:
        return self._error(f"truncated: {what} goes beyond the end of the file at byte {self.size}; download it again")

    def _error(self, text: str) -> GgufError:
        return GgufError(f"{self.path}: {text}")


def short(value: object) -> str:
    """A value from a file as one line of at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
