"""A model in GGUF: one file, or several that `gguf-split` made of it."""

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from penstock.gguf.header import GgufError, GgufTensor, Header, read_header, short

SUFFIX = ".gguf"

_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_REMEMBERED = 16  # files


@dataclass(frozen=True)
class GgufFile:
    """A model's metadata and the tensors of all its files. Callers share it: they must not change it."""

    path: Path  # the first file
    metadata: dict[str, Any]  # bool, int, float, str, or a list of these or of lists
    tensors: dict[str, GgufTensor]


@dataclass(frozen=True)
class PartName:
    """The name of one of several files: `stem-00001-of-00003.gguf`."""

    stem: str
    number: int  # from 1
    count: int

    def sibling(self, number: int) -> str:
        return f"{self.stem}-{number:05}-of-{self.count:05}.gguf"


def part_name(name: str) -> PartName | None:
    """The parts of a file's name; None if it is not that of one of several files."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return None
    return PartName(match["stem"], int(match["number"]), int(match["count"]))


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, by its name, and not that of a folder."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def model_name(path: Path) -> str:
    """The name of a model in a GGUF file: the file's, without its ending and the number of the part."""
    part = part_name(path.name)
    return part.stem if part else path.stem


def read_gguf(path: Path) -> GgufFile:
    """The model in a file and, if it is one of several, in the others. Raises GgufError.

    A file that has not changed is parsed once.
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


@lru_cache(_REMEMBERED)
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
