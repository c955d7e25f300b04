"""Builds of the native library for the tests."""

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.kernels.native.build import AVX2, OPTIONAL, SOURCES, build, compiler, digest
from penstock.kernels.native.loader import LOWER, instruction_sets

ROOT = Path(__file__).parents[3]
# The checks that are left out find what the address sanitizer finds, and double the time to compile.
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize=null,object-size,pointer-overflow")
STRICT = ("-fno-sanitize-recover=all", "-g1")
SETS = ("amx", "avx512_bf16", "avx512", "avx2")
EMULATION = Path(__file__).with_name("emulation")


def runtime(name: str) -> str:
    """The path of a sanitizer's run-time library. Fails the test if the compiler came without it."""
    command = [*compiler(), f"-print-file-name={name}.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.fail(f"{command[0]} lacks {name}.so: install the sanitizers that belong to it (libasan and libtsan)")
    return found


def built_for_all(config: pytest.Config, flags: Sequence[str] = ()) -> Path:
    """The library with all instruction sets; those that this processor lacks use emulated instructions. The first
    process builds it, and others reuse it until its sources change."""
    emulated = dict.fromkeys(
        (file for file in OPTIONAL if Path(file).stem.removeprefix("isa_") not in instruction_sets()),
        (*AVX2, f"-I{EMULATION}", "-Wno-psabi"),
    )
    # Unoptimised, it compiles in seconds and is fast enough. With inlining, it would take three times as long.
    flags = ("-O0", "-Dalways_inline=unused", "-DPENSTOCK_EMULATED", *flags)
    made_from = hashlib.sha256(repr((digest(), compiler(), flags, emulated)).encode())
    for file in sorted(EMULATION.iterdir()):
        made_from.update(file.read_bytes())
    assert config.cache is not None
    library = config.cache.mkdir("penstock-native") / f"{made_from.hexdigest()[:16]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            build(library, flags=flags, sources={**SOURCES, **emulated})
    return library


def of_instruction_set(isa: str, config: pytest.Config) -> dict[str, str]:
    """Environment variables that make `isa` the best instruction set, emulated if the processor lacks it."""
    if isa in instruction_sets():
        return {LOWER: isa}
    return {LOWER: isa, "PENSTOCK_LIBRARY": str(built_for_all(config))}


@pytest.fixture(scope="session")
def sanitized(request: pytest.FixtureRequest) -> Path:
    """The library of all instruction sets with the address and undefined behaviour sanitizers."""
    runtime("libasan")
    return built_for_all(request.config, (*SANITIZE, *STRICT))


@pytest.fixture
def run_cases() -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_cases(way, *threads and sets, **environment) runs tests.kernels.native.cases in a process of its own."""

    def run(way: str, *arguments: int | str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.kernels.native.cases", way, *map(str, arguments)]
        return subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=300,
            check=False,
        )

    return run
