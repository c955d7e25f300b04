"""The kernels under the sanitizers: no access outside memory, no undefined behaviour, no race."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernels.native.build import CPP, compiler
from tests.kernels.native.cases import RIGHT_SIZE
from tests.kernels.native.conftest import SETS, runtime
from tests.often import often

RunCases = Callable[..., subprocess.CompletedProcess[str]]


def environment(library: Path) -> dict[str, str]:
    return {
        "LD_PRELOAD": runtime("libasan"),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PENSTOCK_LIBRARY": str(library),
        "PENSTOCK_ISA": "",  # all of them
    }


@pytest.mark.rare  # four minutes; test_guard_pages.py is the quick check
def test_every_op_is_free_of_bad_memory_accesses_and_undefined_behaviour(run_cases: RunCases, sanitized: Path) -> None:
    done = run_cases("plain", 1, 2, **environment(sanitized))
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-6000:]}"
    ran = done.stdout.splitlines()
    assert ran.count("all right") == 2
    for isa in SETS:
        for threads in (1, 2):
            assert f"{isa}, {threads} threads: linear bfloat16 0 int4-32" in ran


@pytest.mark.rare
@pytest.mark.parametrize("isa", SETS)
def test_a_read_of_a_vector_past_a_tensor_is_reported(run_cases: RunCases, sanitized: Path, isa: str) -> None:
    """The control of the test above, for each instruction set. Reads of some lanes: see test_guard_pages.py."""
    done = run_cases("whole", 1, **{**environment(sanitized), "PENSTOCK_ISA": isa})
    assert done.returncode != 0
    assert done.stdout == f"{RIGHT_SIZE}\n"
    assert "heap-buffer-overflow" in done.stderr and "linear" in done.stderr


@pytest.fixture(scope="session")
def team_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """team_test.cpp with the thread sanitizer."""
    runtime("libtsan")
    program = tmp_path_factory.mktemp("team") / "team_test"
    flags = ("-std=c++20", "-O1", "-g1", "-fsanitize=thread", "-fno-sanitize-recover=all", "-pthread", f"-iquote{CPP}")
    sources = (CPP / "team.cpp", Path(__file__).with_name("team_test.cpp"))
    subprocess.run([*compiler(), *flags, *map(str, sources), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("threads", often([1, 2, 4], [4]))
def test_a_team_has_no_race(team_program: Path, threads: int) -> None:
    options = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [team_program, str(threads), "100"], capture_output=True, text=True, env=options, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "all right\n"), done.stderr[-6000:]
