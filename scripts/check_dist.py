"""Checks what `make dist` built: `python scripts/check_dist.py dist`. Imports only the standard library."""

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Set
from pathlib import Path, PurePosixPath

MOST_BYTES = 24 << 20  # of each file; the embedded models are 17 MB of it
OLDEST_GLIBC = (2, 28)  # PyTorch's wheels need this one: ours must not need a later one
# Each name must end the path of a file of the wheel.
IN_WHEEL = (
    "penstock/py.typed",
    "python-8m/model.safetensors",
    "python-8m/tokenizer.json",
    "pages/playground/playground.html",
    "pages/vendor/inter.woff2",
    "pages/vendor/LICENSE.inter",
    "pages/vendor/NOTICE.md",
    "native/libpenstock.so",
    "cpp/isa/isa_avx2.cpp",
    ".dist-info/licenses/LICENSE",
)
TOP_OF_SDIST = {
    "src",
    "docs",
    "packaging",
    "CHANGELOG.md",
    "LICENSE",
    "README.md",
    "PKG-INFO",
    "constraints.txt",
    "hatch_build.py",
    "pyproject.toml",
    ".gitignore",  # hatchling reads it to leave the compiled library out
}


class Wrong(Exception):
    """A distribution is not as it should be."""


def check_sdist(path: Path) -> None:
    """Raises Wrong if the source distribution holds more or less than it should."""
    _check_size(path)
    with tarfile.open(path) as archive:
        names = [PurePosixPath(member.name) for member in archive if member.isfile()]
    inside = {str(PurePosixPath(*name.parts[1:])) for name in names}
    top = {name.split("/")[0] for name in inside}
    if top != TOP_OF_SDIST:
        raise Wrong(f"{path.name}: the top folder has, or lacks, {', '.join(sorted(top ^ TOP_OF_SDIST))}")
    check_files(inside - {"PKG-INFO"})


def check_files(inside: Set[str]) -> None:
    """Raises Wrong if the files of a source distribution are not those of the checkout. Call it in the checkout."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    if strange := sorted(inside - set(known)):
        raise Wrong(f"the source distribution holds files that git ignores: {', '.join(strange[:5])}")
    needed = [name for name in known if name.startswith(("src/", "docs/", "packaging/")) and Path(name).is_file()]
    if missing := sorted(set(needed) - inside):
        raise Wrong(f"the source distribution lacks {', '.join(missing[:5])}")


def check_wheel(path: Path) -> None:
    """Raises Wrong if the wheel lacks a file, holds one that is no part of it, or needs a system that is too new."""
    _check_size(path)
    names = zipfile.ZipFile(path).namelist()
    for wanted in IN_WHEEL:
        if not any(name.endswith(wanted) for name in names):
            raise Wrong(f"{path.name} lacks {wanted}")
    if strange := [name for name in names if not re.match(r"penstock(-[^/]+\.dist-info)?/", name) or ".pyc" in name]:
        raise Wrong(f"{path.name} holds {', '.join(strange[:5])}")
    python, abi, platforms = path.stem.split("-")[-3:]
    glibc = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)_x86_64", platforms)]
    if (python, abi) != ("py3", "none") or not glibc:
        raise Wrong(f"{path.name}: its tags should be py3, none and manylinux_*_x86_64")
    if min(glibc) > OLDEST_GLIBC:
        need, most = (".".join(map(str, version)) for version in (min(glibc), OLDEST_GLIBC))
        raise Wrong(f"{path.name} needs glibc {need}, later than {most}: see cpp/isa/glibc.h")


def _check_size(path: Path) -> None:
    if path.stat().st_size > MOST_BYTES:
        raise Wrong(f"{path.name} has {path.stat().st_size} bytes, more than {MOST_BYTES}")


def main(folder: Path) -> None:
    """Checks the one source distribution and the one wheel of a folder, and prints where they are."""
    try:
        for pattern, check in (("penstock-*.tar.gz", check_sdist), ("penstock-*.whl", check_wheel)):
            found = list(folder.glob(pattern))
            if len(found) != 1:
                raise Wrong(f"{folder} has {len(found)} files {pattern}, not 1")
            check(found[0])
            print(f"{found[0]}  {found[0].stat().st_size / 1e6:.1f} MB")
    except Wrong as error:
        sys.exit(f"check_dist: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
