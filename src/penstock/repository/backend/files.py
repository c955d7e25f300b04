"""What holds for the files of all kinds of models."""

from pathlib import Path


class HostileFile(ValueError):
    """The file is no model, reaches outside its folder, or has what is never executed. The message says what."""


def inside(path: Path, root: Path) -> None:
    """Raises HostileFile if a path leaves `root`, by its name or by a link, or is no file."""
    real = path.resolve()
    if not real.is_relative_to(root.resolve()):
        raise HostileFile(f"{path.name[:200]!r} leads out of the model's folder; copy the file into the folder")
    if not real.is_file():
        raise HostileFile(f"the file {path.name[:200]!r} is missing")
