"""What pip shows when it installs the source, and what a source distribution holds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from scripts.check_dist import check_files

ROOT = Path(__file__).parents[2]


def hatch(target: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Builds with the project's build backend, as pip does."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    base = {name: value for name, value in os.environ.items() if name not in ("CXX", "PENSTOCK_NO_KERNELS")}
    return subprocess.run(command, cwd=ROOT, env={**base, **environ}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        (None, "No C++ compiler was found"),
        ("", "cannot be run: No such file or directory."),
        ("exit 1", "too old, or incomplete"),
        ('case "$*" in *-fsyntax-only*) exit 0;; esac\nexit 4', "failed with status 4; its messages are above"),
    ],
)
def test_without_a_compiler_it_says_what_to_install(compiler: str | None, reason: str, tmp_path: Path) -> None:
    """`compiler` is the script that $CXX names: "" for none there, None to name none."""
    program = tmp_path / "compiler"
    if compiler:
        program.write_text(f"#!/bin/sh\n{compiler}\n")
        program.chmod(0o755)
    environ = {"PATH": str(tmp_path)} if compiler is None else {"CXX": str(program)}
    done = hatch("wheel", tmp_path / "dist", **environ)
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert reason in said
    for remedy in ("apt install g++", "dnf install gcc-c++", "CXX", "PENSTOCK_NO_KERNELS=1"):
        assert remedy in said
    assert "Traceback" not in said
    assert not list(tmp_path.glob("dist/*.whl"))


def test_kernels_can_be_left_out_on_purpose(tmp_path: Path) -> None:
    done = hatch("wheel", tmp_path, PATH=str(tmp_path), PENSTOCK_NO_KERNELS="1", HATCH_BUILD_HOOKS_ONLY="1")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_source_distribution_holds_what_it_needs_and_nothing_else() -> None:
    """`make dist` checks the archive itself; compressing it takes seconds."""
    files = {file.distribution_path for file in SdistBuilder(str(ROOT)).recurse_included_files()}
    assert "hatch_build.py" in files
    check_files(files)
