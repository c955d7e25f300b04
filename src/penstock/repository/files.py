"""The files of a model, wherever they are."""

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple


class ModelFiles(NamedTuple):
    """A model's settings are in `folder`; names of the files in each version are in `versions`."""

    folder: Path
    versions: Mapping[int, Collection[str]]
    bring: Callable[[int], tuple[Path, object]]  # returns a version's folder, which stays while the object is held


def is_version(name: str) -> bool:
    """Returns whether a folder of this name is a version."""
    return re.fullmatch(r"[1-9][0-9]{0,8}", name) is not None


def local_files(folder: Path) -> ModelFiles:
    """Returns the files of a model in a folder of this machine. Raises OSError."""
    there = {int(each.name): os.listdir(each) for each in folder.iterdir() if is_version(each.name) and each.is_dir()}
    return ModelFiles(folder, there, lambda number: (folder / str(number), None))
