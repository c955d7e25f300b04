"""Implements `penstock rm`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import format_bytes
from penstock.weights.cached_models import LocalModel, cache_folder, cached_models
from penstock.weights.local_models import did_you_mean, full_name
from penstock.weights.packaged import EMBEDDED, PACKAGED

if TYPE_CHECKING:
    from huggingface_hub import DeleteCacheStrategy


def remove(name: str, revision: str | None, yes: bool) -> None:
    """Removes a model of the hub from the cache: all of it, one revision, or one GGUF file. The user must confirm,
    unless `yes`.

    Raises ValueError for a model that is not in the cache.
    """
    models, strategy = find_removal(name, revision)
    names = ", ".join(dict.fromkeys(model.name for model in models))
    of = "" if revision is None else f", revision {models[0].revision[:12]}"
    print(f"{names}{of}: {format_bytes(strategy.expected_freed_size)} in {models[0].repository}")
    if not yes:
        _confirm()
    strategy.execute()
    print(f"removed; {format_bytes(strategy.expected_freed_size)} are free again")


def find_removal(name: str, revision: str | None) -> "tuple[list[LocalModel], DeleteCacheStrategy]":
    """Returns the models that a name means, and what removes them. Raises ValueError for a model that is not in the
    cache."""
    _refuse_others(name)
    models = _find(name, revision)
    return models, _strategy(models, revision)


def _refuse_others(name: str) -> None:
    """Raises ValueError for what is not in the cache, and says how it is removed."""
    if name and Path(os.path.expanduser(name)).exists():
        raise ValueError(f"{name} is your own; penstock rm removes models from Hugging Face's cache only: use rm")
    if name == EMBEDDED:
        raise ValueError(f"{name} is part of Penstock and cannot be removed")
    package = next((package.package for package in PACKAGED if package.name == name), None)
    if package is not None:
        raise ValueError(f"{name} comes as a Python package: run pip uninstall {package}")


def _find(name: str, revision: str | None) -> list[LocalModel]:
    """The models that a name means: several for a repository of GGUF files, or with several revisions."""
    full = name if "/" in name else full_name(name) or name
    found = [model for model in cached_models() if full in (model.name, model.name.partition(":")[0])]
    if not found:
        raise ValueError(f"{name} is not on this machine{did_you_mean(name) or '; penstock list shows what is'}")
    if revision is None:
        return found
    of_revision = [model for model in found if _has_revision(model, revision)]
    if len({model.revision for model in of_revision}) != 1:
        there = ", ".join(dict.fromkeys("/".join(model.refs) or model.revision[:12] for model in found))
        raise ValueError(f"--revision {revision} is not one revision of {name} on this machine; there are: {there}")
    return of_revision


def _has_revision(model: LocalModel, revision: str) -> bool:
    return revision in model.refs or (len(revision) >= 6 and model.revision.startswith(revision))


def _strategy(models: list[LocalModel], revision: str | None) -> "DeleteCacheStrategy":
    """The files to remove, and the bytes that this frees. A file that another revision has as well is kept.

    The whole repository goes if nothing else of it is left, also if it is incomplete or damaged.
    """
    from huggingface_hub import DeleteCacheStrategy, scan_cache_dir

    cache, repository = cache_folder(), models[0].repository
    assert repository is not None
    others = [model for model in cached_models() if model.repository == repository and model not in models]
    if not others:
        files = {file.resolve() for file in repository.rglob("*") if file.is_file()}
        size, none = sum(file.stat().st_size for file in files), frozenset[Path]()
        return DeleteCacheStrategy(size, none, none, frozenset({repository}), none, cache_dir=cache)
    scan = scan_cache_dir(cache)
    found = next((one for one in scan.repos if one.repo_path == repository), None)
    if found is None:
        whole = models[0].name.partition(":")[0]
        raise ValueError(f"the cache of {whole} is damaged, so that only all of it can be removed: penstock rm {whole}")
    if revision is not None:
        return scan.delete_revisions(models[0].revision)
    paths = {path for model in models for path in model.files}
    return scan.delete_files(*(file for one in found.revisions for file in one.files if file.file_path in paths))


def _confirm() -> None:
    if not sys.stdin.isatty():
        raise ValueError("standard input is not a terminal, so nothing was removed: add --yes")
    if input("Remove it? [y/N] ").strip().lower() not in ("y", "yes"):
        sys.exit("nothing was removed")
