"""Compiles the native kernels: when the package is installed, and by `python src/penstock/kernels/native/build.py`.

Imports nothing but the standard library, as it runs before anything is installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "libpenstock.so"
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-pthread")
SOURCES: dict[str, tuple[str, ...]] = {
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "library.cpp": (),
    "team.cpp": (),
}


class CannotBuild(Exception):
    """There is nothing to build with, or for."""


def digest() -> str:
    """Of all that the library is made from."""
    files = sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"), Path(__file__)))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def compiler() -> list[str]:
    """$CXX, or the first compiler found."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("no C++ compiler was found: install g++, or name one in CXX")


def build(target: Path = LIBRARY, *, flags: Sequence[str] = ()) -> None:
    """Compile all files at once and link them. Raises CannotBuild, or CalledProcessError with the compiler's words."""
    if platform.machine() not in {"x86_64", "AMD64"} or sys.platform != "linux":
        raise CannotBuild(f"there are no native kernels for {platform.machine()} on {sys.platform}")
    command = [*compiler(), *FLAGS, *flags, f'-DPENSTOCK_DIGEST="{digest()}"']
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder, name).with_suffix(".o")) for name in SOURCES]
        running = [
            subprocess.Popen([*command, *extra, "-c", str(HERE / name), "-o", out])
            for (name, extra), out in zip(SOURCES.items(), objects, strict=True)
        ]
        codes = [process.wait() for process in running]
        for process, code in zip(running, codes, strict=True):
            if code:
                raise subprocess.CalledProcessError(code, process.args)
        # Linked beside and moved into place: a process that has the old one loaded keeps it.
        linked = Path(folder, "linked.so")
        subprocess.run([*command, "-shared", *objects, "-o", str(linked)], check=True)
        staged = target.with_suffix(".new")
        shutil.copy(linked, staged)
        staged.replace(target)


if __name__ == "__main__":
    build()
