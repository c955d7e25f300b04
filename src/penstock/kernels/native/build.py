"""Compiles the native kernels: when the package is installed, and by `python src/penstock/kernels/native/build.py`.

Imports only the standard library, as it runs before anything is installed.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("libpenstock.so")
CPP = Path(__file__).with_name("cpp")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
# GCC 12 warns of the "undefined" registers in its own headers.
AVX512 = (
    *AVX2,
    *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")),
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-pthread",
    f"-iquote{CPP}",
)
SOURCES: dict[str, tuple[str, ...]] = {  # relative to cpp/; the slowest to compile first, to keep all processors busy
    "isa/isa_avx512.cpp": AVX512,
    "isa/isa_avx2.cpp": AVX2,
    "isa/isa_avx512_bf16.cpp": (*AVX512, "-mavx512bf16"),
    "isa/isa_amx.cpp": (*AVX512, "-mavx512bf16", "-mavx512fp16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    "library.cpp": (),
    "pack.cpp": ("-mavx2", "-mf16c"),
    "quantize.cpp": ("-mavx2", "-mf16c"),
    "gguf_rows.cpp": ("-mavx2", "-mf16c"),
    "reading.cpp": (),
    "team.cpp": (),
    "lease.cpp": (),
}
OPTIONAL = {
    "isa/isa_amx.cpp": "PENSTOCK_AMX",
    "isa/isa_avx512_bf16.cpp": "PENSTOCK_AVX512_BF16",
    "isa/isa_avx512.cpp": "PENSTOCK_AVX512",
}  # defined when the file was built


# Compiles with a compiler and a standard library that are new enough.
PROBE = "#include <atomic>\nstatic_assert(__cpp_lib_atomic_wait >= 201907L);"


class CannotBuild(Exception):
    """The library cannot be built; the message has the reason and the remedy."""


class NoKernels(CannotBuild):
    """There are no native kernels for this machine."""


def digest() -> str:
    """The digest of everything that the library is built from."""
    files = [*sorted((*CPP.rglob("*.cpp"), *CPP.rglob("*.h"))), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild("No C++ compiler was found (c++, g++ or clang++).")


def _takes(flags: Sequence[str], source: str = "") -> bool:
    """True if the compiler accepts the flags and the source."""
    command = [*compiler(), *flags, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source.encode(), stderr=subprocess.DEVNULL).returncode == 0


def _check_compiler() -> None:
    """Raises CannotBuild when there is no compiler, or it is too old."""
    name = shlex.join(compiler())
    try:
        if not _takes(["-std=c++20"], PROBE):
            raise CannotBuild(f"{name} cannot compile std::atomic::wait of C++20: it is too old, or incomplete.")
    except OSError as error:
        raise CannotBuild(f"{name} cannot be run: {error.strerror}.") from None


def _check(done: subprocess.CompletedProcess[Any]) -> None:
    if done.returncode:
        raise CannotBuild(f"{done.args[0]} failed with status {done.returncode}; its messages are above.")


def build(target: Path = LIBRARY, *, flags: Sequence[str] = (), sources: Mapping[str, Sequence[str]] = SOURCES) -> None:
    """Compile as many files at once as there are processors, and link them. An optional file is left out if the
    compiler does not support its flags.

    Raises CannotBuild. If the compiler fails, its messages are on stderr.
    """
    if platform.machine() not in {"x86_64", "AMD64"} or sys.platform != "linux":
        raise NoKernels(f"there are no native kernels for {platform.machine()} on {sys.platform}")
    _check_compiler()
    command = [*compiler(), *FLAGS, *flags, f'-DPENSTOCK_DIGEST="{digest()}"']
    left_out = {name for name in OPTIONAL if name in sources and not _takes(sources[name])}
    for name in left_out:
        print(f"{name} is left out: {command[0]} does not support {' '.join(sources[name])}", file=sys.stderr)
    sources = {name: extra for name, extra in sources.items() if name not in left_out}
    command += [f"-D{macro}" for name, macro in OPTIONAL.items() if name in sources]
    with tempfile.TemporaryDirectory() as folder:
        objects = [str(Path(folder, f"{Path(name).stem}.o")) for name in sources]
        compilations = [
            [*command, *extra, "-c", str(CPP / name), "-o", out]
            for (name, extra), out in zip(sources.items(), objects, strict=True)
        ]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as at_once:
            for done in at_once.map(subprocess.run, compilations):
                _check(done)
        # Moved into place, so that processes which have the old library loaded keep it.
        linked = Path(folder, "linked.so")
        _check(subprocess.run([*command, "-shared", *objects, "-o", str(linked)]))
        staged = target.with_suffix(".new")
        shutil.copy(linked, staged)
        staged.replace(target)


if __name__ == "__main__":
    try:
        build()
    except CannotBuild as error:
        sys.exit(f"penstock: {error}")
