"""The models on this machine, and the names that they have in commands. No file of a model is opened."""

from collections.abc import Iterable
from pathlib import Path

from penstock.weights.cached_models import LocalModel, cached_models
from penstock.weights.packaged import EMBEDDED, PACKAGED, embedded_model

PENSTOCK = "part of Penstock"


def local_models(cache: Path | None = None) -> list[LocalModel]:
    """Returns the models that are part of Penstock, come as packages or are in Hugging Face's cache."""
    return [_embedded(), *_packaged(), *cached_models(cache)]


def full_name(name: str, cache: Path | None = None) -> str | None:
    """Returns org/model for `model`, if exactly one model in the cache has this name, in any case of letters.

    Returns None if there is none. Raises ValueError if there are several.
    """
    wanted = name.lower()
    found = dict.fromkeys(model.name for model in cached_models(cache) if wanted in _short_names(model))
    if len(found) > 1:
        raise ValueError(f"{name!r} can mean {' or '.join(found)}: write the whole name")
    return next(iter(found), None)


def known_names() -> list[str]:
    """Returns the names that stand for models in commands, the short ones included."""
    cached = cached_models()
    names = [EMBEDDED, *(model.name for model in PACKAGED), *(model.name for model in cached)]
    return list(dict.fromkeys([*names, *(short for model in cached for short in _short_names(model))]))


def did_you_mean(name: str, cache: Path | None = None) -> str:
    """Returns a clause that names the models on this machine with similar names, or an empty text."""
    import difflib  # imported only for errors

    names = [model.name for model in local_models(cache) if model.path] + [model.name for model in PACKAGED]
    names = [other for other in dict.fromkeys(names) if other != name]
    near = difflib.get_close_matches(name.lower(), _forms(names), n=3, cutoff=0.6)
    close = dict.fromkeys(original for form in near for original in names if form in _forms([original]))
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _forms(names: Iterable[str]) -> list[str]:
    """The ways in which a user may begin to write the names, in lower case."""
    return [form.lower() for name in names for form in dict.fromkeys((name, name.rpartition("/")[2]))]


def _short_names(model: LocalModel) -> tuple[str, str]:
    repository, colon, tag = model.name.lower().partition(":")
    short = repository.rpartition("/")[2]
    return short, short + colon + tag


def _embedded() -> LocalModel:
    folder = embedded_model()
    status = [path.stat() for path in folder.iterdir()]
    size, modified = sum(one.st_size for one in status), max(one.st_mtime for one in status)
    return LocalModel(EMBEDDED, PENSTOCK, folder, size, modified)


def _packaged() -> Iterable[LocalModel]:
    for model in PACKAGED:
        path = model.find()
        if path is not None and path.exists():
            status = (path / "model.safetensors" if path.is_dir() else path).stat()
            yield LocalModel(model.name, f"package {model.package}", path, status.st_size, status.st_mtime)
