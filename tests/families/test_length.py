"""A family costs at most 80 lines, blank ones and docstrings included."""

import inspect
from pathlib import Path

from penstock.families import decoders, encoders
from penstock.families.registry import DECODERS, ENCODERS, FAMILIES

LIMIT = 80
# Parts that are not data of one family: what families share, and the form of checkpoints.
SHARED = {"hybrids/shared.py", "hybrids/mlp_layers.py", "encoders/shared.py"}


def family_files() -> dict[str, list[str]]:
    """The lines of the files of families, by folder and name."""
    folders = [Path(package.__path__[0]) for package in (decoders, encoders)]
    paths = [path for folder in folders for path in folder.rglob("*.py") if path.name != "__init__.py"]
    files = {f"{path.parent.name}/{path.name}": path.read_text().splitlines() for path in paths}
    return {name: lines for name, lines in files.items() if name not in SHARED}


def test_no_file_of_a_family_is_longer() -> None:
    files = family_files()
    assert len(files) > 25
    assert {name: len(lines) for name, lines in files.items() if len(lines) > LIMIT} == {}


def test_every_family_is_in_such_a_file() -> None:
    """So that none is written where its length does not count."""
    made = {inspect.getsourcefile(inspect.unwrap(family)) for family in (FAMILIES | ENCODERS | DECODERS).values()}
    names = {"/".join(Path(str(path)).parts[-2:]) for path in made} - {"families/multimodal.py"}
    assert names == family_files().keys()
