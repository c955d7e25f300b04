"""The models on this machine for `penstock serve --manage-models`: `list`, `pull` and `rm` without a terminal."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.cli.models.rm import find_removal
from penstock.frontend.store import StoredModel
from penstock.weights.hub import pull_model
from penstock.weights.local_models import local_models


class LocalStore:
    """A `frontend.store.ModelStore`."""

    def __init__(self, in_use: Callable[[], Sequence[Path]]) -> None:
        """`in_use` returns the paths of the models that the server uses now. They cannot be removed."""
        self._in_use = in_use
        self._pulling = threading.Lock()  # one download at a time: it fills the disk and the line

    def models(self) -> list[StoredModel]:
        return [
            StoredModel(model.name, model.size, model.modified, model.revision)
            for model in local_models()
            if model.path is not None
        ]

    def pull(self, name: str, watch: Callable[[int, int], None]) -> None:
        if any(name == model.name and model.repository is None for model in local_models()):
            return  # a part of Penstock, or a package
        if name.startswith(("/", ".", "~")):
            raise ValueError(f"{name!r} is a path; name a model of the hub, such as org/name")
        if not self._pulling.acquire(blocking=False):
            raise ValueError("another model is being pulled; try again later")
        try:
            pull_model(name, progress=False, watch=watch)
        finally:
            self._pulling.release()

    def remove(self, name: str) -> None:
        models, strategy = find_removal(name, None)
        used = [path.absolute() for path in self._in_use()]  # with links: a snapshot's files have no model's name
        for model in models:
            repository = model.repository
            if repository is not None and any(path.is_relative_to(repository.absolute()) for path in used):
                raise ValueError(f"{name} is in use: it has this server's model; stop the server, then run penstock rm")
        strategy.execute()
