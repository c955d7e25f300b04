"""Implements `penstock manifest`."""

import time

from penstock.config import format_bytes
from penstock.families.checkpoint.stored import CheckpointError
from penstock.observe.progress import progress_bar
from penstock.weights.files import model_bytes
from penstock.weights.hub import locate_model
from penstock.weights.manifest import NAME, ManifestCheck, manifest_path, write_manifest
from penstock.weights.packaged import locate_default


def manifest(model: str | None, revision: str | None, check: bool) -> None:
    """Writes the manifest of a model, or compares its files with it. Raises CheckpointError, OSError and what
    `locate_model` raises."""
    path = locate_default() if model is None else locate_model(model, revision, network=False)
    size = model_bytes(path)
    began = time.perf_counter()
    with progress_bar(f"hashing {path.name}", size, wanted=True, in_bytes=True) as advance:
        if not check:
            sums = write_manifest(path, advance)
            seconds = time.perf_counter() - began
            print(f"{manifest_path(path)}: {len(sums)} files, {format_bytes(size)}, hashed in {seconds:.1f} s")
            return
        found = ManifestCheck(path, advance).result()
    if found is None:
        raise CheckpointError(f"{path} has no {NAME} beside it; write it: penstock manifest {model or ''}".rstrip())
    print(found)
