"""Finds a model's files: a folder, a GGUF file, a Python package, or a hub id, whose files are in Hugging Face's cache.

HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE mean what they mean for huggingface_hub.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.gguf import is_gguf, not_a_model
from penstock.weights.gguf_choice import HubError, model_in_folder
from penstock.weights.packaged import locate_packaged

if TYPE_CHECKING:
    from penstock.weights.hub_snapshot import Snapshot

Watch = Callable[[int, int], None]
_HUB_ID = re.compile(
    r"(?P<id>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(:(?P<tag>[^:\s][^:\x00-\x1f\x7f]{0,255}))?"
)


def locate_model(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    progress: bool = True,
    network: bool = True,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> Path:
    """The folder of a model, or its GGUF file. `name` is a path, or a name that `penstock list` prints, or a hub id,
    which is downloaded: `org/name`, without its weights if `weights` is false, or `org/name:Q4_K_M`, the GGUF file of
    that quantisation.

    A folder that holds one model in GGUF and no safetensors stands for its file. If the hub cannot be reached, or with
    `network` false, a complete snapshot in the cache is used. Raises HubError. `endpoint` and `cache` replace
    HF_ENDPOINT and HF_HUB_CACHE, which huggingface_hub reads only once.
    """
    path = local_path(name, revision)
    if path is not None:
        return path
    snapshot = _snapshot(name, revision, weights=weights, endpoint=endpoint, cache=cache)
    return snapshot.locate(progress) if network else snapshot.cached()


def pull_model(
    name: str,
    revision: str | None = None,
    *,
    progress: bool = True,
    watch: Watch | None = None,
    endpoint: str | None = None,
    cache: Path | None = None,
) -> Path:
    """Downloads a model from the hub, or what is new in it. Returns its path in the cache. Raises HubError, also if the
    hub cannot be reached and a snapshot is in the cache.

    `watch` gets the bytes of large files done and in total, several times a second; what it raises ends the download.
    """
    snapshot = _snapshot(name, revision, weights=True, endpoint=endpoint, cache=cache)
    snapshot.watch = watch
    return snapshot.locate(progress, fallback=False)


def local_path(name: str, revision: str | None) -> Path | None:
    """Returns the path of a model that is named by its path or is part of a Python package; None for other names.

    Raises HubError if such a model is to have a revision, is not installed or is damaged, or if its files hold none."""
    path = Path(os.path.expanduser(name))
    if name and path.exists():
        kind = "a folder" if path.is_dir() else "a file"
        if not path.is_dir() and not is_gguf(path):
            raise HubError(not_a_model(path))
    else:
        found = locate_packaged(name)
        if found is None:
            return None
        path, kind = found, "part of a Python package"
    if revision is not None:
        raise HubError(f"{name} is {kind}, which has no revisions; leave --revision {revision} out")
    return model_in_folder(path) if path.is_dir() else path


def _snapshot(
    name: str, revision: str | None, *, weights: bool, endpoint: str | None, cache: Path | None
) -> "Snapshot":
    """The snapshot of a hub id or, in short, of a model in the cache."""
    from penstock.weights.hub_snapshot import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, Snapshot
    from penstock.weights.local_models import did_you_mean, full_name  # imported here: a path needs none of these

    try:
        full = name if "/" in name or not name else full_name(name, cache) or name
    except ValueError as error:
        raise HubError(str(error)) from None
    if not name or name[0] in "./~" or (name.endswith(".gguf") and ":" not in name):
        raise HubError(f"there is no file or folder {name!r}: check the path; penstock list shows other models")
    match = _HUB_ID.fullmatch(full)
    if match is None or ".." in match["id"] or "--" in match["id"]:
        raise HubError(
            f"{name!r} is neither a folder, a GGUF file, the name of a model on this machine nor a hub id such as "
            f"'org/model' or 'org/model:Q4_K_M'{did_you_mean(name, cache) or '; penstock list shows the names'}"
        )
    patterns = CONFIG_FILES + TOKENIZER_FILES + (WEIGHT_FILES if weights else ())
    return Snapshot(match["id"], match["tag"], revision, patterns, endpoint, cache)
