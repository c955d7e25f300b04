"""The Dockerfile: what hadolint says, what its build context holds, and how the server gets signals."""

import fnmatch
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from penstock.cli.operate import health

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """The (name, argument) of each instruction, with continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = "\n".join(lines).replace("\\\n", "")
    return [(line.split(None, 1)[0], line.split(None, 1)[1].strip()) for line in text.splitlines() if line.strip()]


def values(name: str) -> list[str]:
    return [argument for instruction, argument in instructions() if instruction == name]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert hadolint, "hadolint is missing: run make install-dev"
    done = subprocess.run([hadolint, "--no-color", str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_signals_reach_the_server_and_it_is_not_root() -> None:
    assert json.loads(values("ENTRYPOINT")[0]) == ["penstock"]  # a list: no shell in between
    assert json.loads(values("CMD")[0]) == ["serve"]
    assert values("USER") == ["1000:1000"]
    names = [name for name, _ in instructions()]
    assert names.index("USER") > len(names) - 1 - names[::-1].index("FROM")  # in the last stage
    assert not [name for name in names[names.index("USER") :] if name in ("RUN", "COPY", "ADD")]


def test_the_health_check_is_a_program_of_the_package() -> None:
    command = json.loads(values("HEALTHCHECK")[0].partition("CMD")[2])
    assert command == ["python", "-m", health.__name__]


def test_what_is_stored_outlives_a_container() -> None:
    (environment,) = (dict(part.split("=", 1) for part in shlex.split(each)) for each in values("ENV"))
    volumes = values("VOLUME")[0].split()
    assert {environment["HF_HOME"], environment["PENSTOCK_STATE_DIR"]} == set(volumes)
    (made,) = (each for each in values("RUN") if "useradd" in each)
    assert all(volume in made for volume in volumes)  # they belong to the user, so the volumes do


def test_the_build_context_is_what_the_wheel_is_built_from() -> None:
    """.dockerignore leaves all out but the names that it lists, and a wheel needs all of these and no other."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    assert all((ROOT / name).exists() for name in allowed)
    needed = {"src", "hatch_build.py", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert set(allowed) == needed
    left_out = [line for line in lines[1:] if not line.startswith("!")]
    assert any(fnmatch.fnmatch("src/penstock/kernels/native/libpenstock.so", line) for line in left_out)
