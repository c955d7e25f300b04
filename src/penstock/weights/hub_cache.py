"""One model's folder in Hugging Face's cache, in the layout of huggingface_hub, which reads it:

models--ORG--NAME/blobs/DIGEST               the content of files
models--ORG--NAME/snapshots/COMMIT/FILE      a link to the content
models--ORG--NAME/trees/COMMIT.json          the files that the hub lists, by which it knows whether a snapshot is whole
models--ORG--NAME/refs/REVISION              the commit of a branch or tag
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from penstock.weights.hub_listing import Listing


class ModelFolder:
    def __init__(self, cache: Path, name: str) -> None:
        self._folder = cache / f"models--{name.replace('/', '--')}"

    def blob(self, digest: str) -> Path:
        return self._folder / "blobs" / digest

    def snapshot(self, commit: str) -> Path:
        return self._folder / "snapshots" / commit

    def link(self, commit: str, files: Iterable[tuple[str, str]]) -> Path:
        """Makes the snapshot's links to files, each with its name and digest, whose blobs are complete."""
        folder = self.snapshot(commit)
        folder.mkdir(parents=True, exist_ok=True)
        for name, digest in files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace_by_link(path, self.blob(digest))
        return folder

    def list_files(self, listing: Listing) -> None:
        """Notes which files the hub lists."""
        files = {
            file.name: {"size": file.size, "blob_id": file.git_blob}
            | ({"lfs_sha256": file.digest, "lfs_size": file.size} if file.large else {})
            for file in listing.files
        }
        path = self._folder / "trees" / f"{listing.commit}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format_version": 1, "files": files}, indent=1))

    def refer(self, revision: str, commit: str) -> None:
        """Notes the commit of a branch or tag."""
        path = self._folder / "refs" / revision
        if revision == commit or ".." in path.parts:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(commit)


def _replace_by_link(path: Path, blob: Path) -> None:
    """Lets `path` be a link to a blob, or a copy of it where the file system has no links."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            made.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:
            shutil.copyfile(blob, made)
        made.replace(path)
