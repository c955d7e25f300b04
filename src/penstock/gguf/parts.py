"""Reads the metadata and the tensor table of a GGUF model: one file, or the parts that `gguf-split` made of one.

A part is one file of a split model. Tensor data is not read here.
"""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.gguf.header import GgufError, GgufTensor, Header, read_header, short
from penstock.gguf.types import FILE_TYPES

SUFFIX = ".gguf"

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_CACHED_FILES = 16


@dataclass(frozen=True)
class GgufFile:
    """The metadata of a model's first part, and the tensors of all its parts.

    All callers share these dicts through a cache: do not change them.
    """

    path: Path  # the file, or the first part of a split model
    metadata: dict[str, Any]  # bool, int, float, str, or a list of these or of lists
    tensors: dict[str, GgufTensor]

    @property
    def file_type(self) -> str | None:
        """How the file was quantised, such as Q4_K_M, if it says so."""
        kind = self.metadata.get("general.file_type")
        return FILE_TYPES.get(kind) if isinstance(kind, int) else None


@dataclass(frozen=True)
class PartName:
    """The fields of a part's file name: `stem-00001-of-00003.gguf`."""

    stem: str
    number: int  # from 1
    count: int

    def sibling(self, number: int) -> str:
        """Returns the file name of another part of the same model."""
        return f"{self.stem}-{number:05}-of-{self.count:05}.gguf"


def part_name(name: str) -> PartName | None:
    """Returns the fields of a part's file name, or None if `name` is not the name of a part."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return PartName(match["stem"], int(match["number"]), int(match["count"]))


def is_gguf(path: Path) -> bool:
    """Returns True if `path` ends in .gguf and is not a folder. The file need not exist."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """Returns a GGUF model's name: its file name without `.gguf` and without the number of the part."""
    part = part_name(path.name)
    return part.stem if part else path.stem


def read_gguf(path: Path) -> GgufFile:
    """Returns the metadata and tensors of a GGUF model. Raises GgufError.

    `path` may be any part of a split model: the other parts must be in the same folder, and are read too. Parsed
    headers are cached until the inode, time or size of their file changes.
    """
    header = _cached(path)
    if header.metadata.get("split.count", 1) == 1:
        return GgufFile(path, header.metadata, header.tensors)
    return _joined(path, header.metadata["split.count"])


def _cached(path: Path) -> Header:
    try:
        status = os.stat(path)
    except OSError as error:
        raise GgufError(f"{path}: cannot be read: {error.strerror or error}") from None
    return _parsed(path, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(_CACHED_FILES)
def _parsed(path: Path, inode: int, modified: int, size: int) -> Header:
    return read_header(path)


def _joined(path: Path, count: Any) -> GgufFile:
    name = part_name(path.name)
    if name is None or name.count != count:
        pattern = f"NAME-00001-of-{count:05}.gguf" if type(count) is int else "NAME-00001-of-00002.gguf"
        raise GgufError(f"{path}: split.count is {short(count)}, so its name must be like {pattern}; rename it")
    paths = [path.with_name(name.sibling(number)) for number in range(1, name.count + 1)]
    for number, other in enumerate(paths, 1):
        if not other.is_file():
            raise GgufError(f"{path}: part {number} of {count} is missing: {other.name}; download it")
    first = _cached(paths[0])
    tensors: dict[str, GgufTensor] = {}
    for index, other in enumerate(paths):
        header = _cached(other)
        for key, expected in (("split.count", count), ("split.no", index)):
            if (value := header.metadata.get(key)) != expected:
                raise GgufError(f"{other}: {key} is {short(value)}; expected {expected}")
        twice = next((tensor for tensor in header.tensors if tensor in tensors), None)
        if twice is not None:
            raise GgufError(f"{other}: tensor {short(twice)} is also in {tensors[twice].path.name}")
        tensors |= header.tensors
    total = first.metadata.get("split.tensors.count")
    if total != len(tensors):
        raise GgufError(f"{paths[0]}: split.tensors.count is {short(total)}, but the parts have {len(tensors)} tensors")
    return GgufFile(paths[0], first.metadata, tensors)
