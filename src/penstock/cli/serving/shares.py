"""Divides the machine among the engines of a server that has several language models."""

from pathlib import Path

import msgspec

from penstock.config import Hardware
from penstock.messages.tensors import LoadFailed
from penstock.repository.entry import Folder


def language_models(path: Path) -> int:
    """Returns the number of language models in a repository. Raises ValueError if there is no such folder."""
    folder = Folder(path)
    count = 0
    for name in folder.names():
        try:
            count += folder.kind(name) == "llm"
        except LoadFailed:
            pass  # loading it gives the error
    return count


def machine_share(hardware: Hardware, engines: int, memory: int | None = None) -> Hardware:
    """Returns what one of `engines` engines may use: equal parts of the cores, and of `memory` bytes, which are those
    available now if None."""
    available = hardware.memory_available if memory is None else memory
    return msgspec.structs.replace(
        hardware,
        cores=max(hardware.cores // engines, 1),
        memory_available=min(available // engines, hardware.memory_available),
    )
