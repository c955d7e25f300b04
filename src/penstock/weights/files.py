"""The files of a model: those that decide its answers, and what shows that one has changed."""

from collections.abc import Iterator
from pathlib import Path

from penstock.gguf import is_gguf
from penstock.weights.checkpoint import stored_tensors

TEXTS = (".json", ".jinja", ".model", ".txt")  # of tokenizers, chat templates and configurations
MAX_TEXT_BYTES = 64 << 20  # of one of these, as far as it is read

# A file's path, inode, time of its last change in ns, and size.
FileState = tuple[str, int, int, int]


def model_files(model: Path) -> list[Path]:
    """The files of a model: the parts of a GGUF file, or all that lie in its folder, in order."""
    if is_gguf(model):
        return sorted({model, *(tensor.path for tensor in stored_tensors(model).values())})
    return sorted(path for path in model.iterdir() if path.is_file() and not path.name.startswith("."))


def model_bytes(model: Path) -> int:
    """The size of a model's files."""
    return sum(path.stat().st_size for path in model_files(model))


def file_states(model: Path) -> tuple[FileState, ...]:
    """Returns a state for each file, which differs when a file of a model has changed, been added or been replaced."""
    found = []
    for path in model_files(model):
        status = path.stat()
        found.append((str(path.resolve()), status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def text_files(model: Path) -> Iterator[tuple[Path, int]]:
    """The files beside the weights that decide what texts a model reads and writes, each with the number of bytes from
    its beginning that do. For a GGUF file this is its header."""
    if is_gguf(model):
        begin = min((tensor.offset for tensor in stored_tensors(model).values() if tensor.path == model), default=0)
        yield model, min(begin or MAX_TEXT_BYTES, MAX_TEXT_BYTES)
        return
    for path in model_files(model):
        if path.suffix in TEXTS and not path.name.endswith(".index.json"):
            yield path, MAX_TEXT_BYTES
