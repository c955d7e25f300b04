"""The models that a simulation can size: those of models.yaml, and any folder with a config.json."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from penstock.families import ModelSpec, load_spec, spec_from_config

KNOWN = Path(__file__).parent / "models.yaml"


@cache
def _known() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(KNOWN.read_bytes())
    return loaded


def model_names() -> list[str]:
    """Returns the names in models.yaml."""
    return list(_known())


@cache
def find_spec(name: str) -> ModelSpec:
    """Returns a model's sizes. Raises ValueError for a name that is neither in models.yaml nor a model's folder or
    file."""
    if name in _known():
        return spec_from_config(_known()[name], name)
    path = Path(name)
    if not path.exists():
        raise ValueError(
            f"the model {name!r} is not known: give a folder with config.json, a GGUF file, or one of "
            f"{', '.join(_known())}"
        )
    return load_spec(path)
