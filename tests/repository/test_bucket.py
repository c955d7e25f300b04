"""`--repository s3://…`: what comes into the cache, what stays in it, and what cannot."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from penstock.messages.tensors import LoadFailed
from penstock.repository import bucket as bucket_module
from penstock.repository.entry import Folder
from tests.e2e.server import serving
from tests.patience import wait_for
from tests.repository import onnx_files as files
from tests.repository.bucket_server import BucketServer, bucket
from tests.repository.onnx_files import put

__all__ = ["bucket"]
URL = "s3://models/of/mine"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "repository"


def versions(cache: Path) -> set[str]:
    """The versions in the cache: their models, and their numbers."""
    return {f"{path.parent.name}/{path.name.split('-')[0]}" for path in cache.glob("*/*/*-*") if path.is_dir()}


def test_a_bucket_reads_as_a_folder_does(bucket: BucketServer, tmp_path: Path) -> None:
    """The same files are the same versions, wherever they are."""
    local = tmp_path / "models"
    put(local, "ranks", files.scale(2), settings="versions: all\nlabels: {stable: 1}")
    put(local, "ranks", files.scale(3), version=2)
    put(local, "pair", b"", settings="steps: [{model: ranks, inputs: {x: IN}, outputs: {y: OUT}}]")
    (local / "ranks" / "1" / "more").mkdir()
    (local / "ranks" / "1" / "more" / "data.bin").write_bytes(os.urandom(3 * MIB))
    for path in local.rglob("*"):
        if path.is_file():
            bucket.put(f"of/mine/{path.relative_to(local)}", path.read_bytes())
    bucket.put("of/mine/ranks/", b"")  # what tools make for a folder
    bucket.put("of/mine/ranks/2/", b"")
    bucket.put("of/others/secret/1/model.onnx", files.scale(9))
    ours, theirs = Folder(local), Folder(URL)
    assert theirs.names() == ours.names() == ["pair", "ranks"]
    assert theirs.kind("ranks") == "onnx" and theirs.kind("pair") == "pipeline" and theirs.members("pair") == {"ranks"}
    for mine, same in zip(ours.read("ranks").targets, theirs.read("ranks").targets, strict=True):
        assert mine.key == same.key and mine.size == same.size and mine.settings == same.settings
        assert (same.folder / "model.onnx").read_bytes() == (mine.folder / "model.onnx").read_bytes()
    with pytest.raises(LoadFailed, match="there is no folder 'secret' in it"):
        theirs.read("secret")


def test_only_what_has_changed_is_fetched(bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("of/mine/ranks/1/model.onnx", files.scale(2))
    bucket.put("of/mine/ranks/model.yaml", b"max-batch-size: 4")
    first = Folder(URL).read("ranks")
    fetched: list[str] = []
    fetch = bucket_module.Bucket._fetch
    monkeypatch.setattr(
        bucket_module.Bucket,
        "_fetch",
        lambda self, found, *rest: (fetched.append(found.key), fetch(self, found, *rest)),
    )
    folder = Folder(URL)
    assert folder.read("ranks").targets[0].key == first.targets[0].key
    assert [key.rpartition("/")[2] for key in fetched] == ["model.yaml"]  # once in a process
    folder.read("ranks")
    assert len(fetched) == 1
    bucket.put("of/mine/ranks/1/model.onnx", files.scale(3))
    changed = folder.read("ranks").targets[0]
    assert changed.key != first.targets[0].key and changed.folder != first.targets[0].folder
    assert first.targets[0].folder.is_dir() and len(fetched) == 2
    bucket.delete("of/mine/ranks/model.yaml")
    assert folder.read("ranks").settings.max_batch_size is None


def test_a_large_file_comes_in_pieces(bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", 100_000)
    data = np.random.default_rng(1).bytes(3 * MIB + 17)
    bucket.put("of/mine/large/1/model.onnx", files.scale(1))
    bucket.put("of/mine/large/1/data.bin", data)
    bucket.put("of/mine/large/1/empty.bin", b"")
    (target,) = Folder(URL).read("large").targets
    assert (target.folder / "data.bin").read_bytes() == data and (target.folder / "empty.bin").read_bytes() == b""


def test_the_cache_is_bounded_and_what_is_used_stays(bucket: BucketServer, cache: Path) -> None:
    for name in ("a", "b", "c", "d"):
        bucket.put(f"of/mine/{name}/1/model.onnx", files.scale(2))
        bucket.put(f"of/mine/{name}/1/data.bin", os.urandom(MIB))
    folder = Folder(URL, 5 * MIB // 2)
    held = folder.read("a")
    folder.read("b")
    assert versions(cache) == {"a/1", "b/1"}
    folder.read("c")  # b is older than c; a is in use
    assert versions(cache) == {"a/1", "c/1"}
    also = folder.read("c")
    with pytest.raises(LoadFailed, match="may have 2 MiB, of which 2 MiB are in use; unload a model, or set a larger"):
        folder.read("d")
    assert versions(cache) == {"a/1", "c/1"}
    other = Folder(URL, 5 * MIB // 2)  # as another server's
    with pytest.raises(LoadFailed, match="in use"):
        other.read("d")
    del held
    other.read("d")
    assert versions(cache) == {"c/1", "d/1"} and also.targets[0].folder.is_dir()
    with pytest.raises(LoadFailed, match="it has 1 MiB, and the cache on disk may have 1000 KiB"):
        Folder(URL, 1000 << 10).read("b")


def test_a_download_that_fails_leaves_nothing(
    bucket: BucketServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_module, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(bucket_module, "CONNECTIONS", 1)
    bucket.put("of/mine/ranks/1/model.onnx", files.scale(2))
    bucket.put("of/mine/ranks/1/data.bin", os.urandom(MIB))
    folder = Folder(URL)
    fetch = bucket_module.Bucket._fetch

    def change(self: bucket_module.Bucket, found: bucket_module._Object, path: Path, start: int, end: int) -> None:
        fetch(self, found, path, start, end)
        if start == 300_000:
            bucket.put("of/mine/ranks/1/data.bin", b"\0" * MIB)  # another content, in the middle

    monkeypatch.setattr(bucket_module.Bucket, "_fetch", change)
    with pytest.raises(LoadFailed, match=r"[Pp]recondition"):
        folder.read("ranks")
    assert versions(cache) == set() and list(cache.glob(".part-*")) == [] and list(cache.glob("*/*/.*")) == []
    (cache / ".part-killed" / "files").mkdir(parents=True)
    (cache / ".part-killed" / "lock").touch()  # without a process that holds it
    monkeypatch.setattr(bucket_module.Bucket, "_fetch", fetch)
    (target,) = Folder(URL).read("ranks").targets
    assert (target.folder / "data.bin").read_bytes() == b"\0" * MIB and list(cache.glob(".part-*")) == []


def test_a_file_that_the_disk_has_spoilt_is_fetched_again(bucket: BucketServer) -> None:
    bucket.put("of/mine/ranks/1/model.onnx", files.scale(2))
    (target,) = Folder(URL).read("ranks").targets
    path = target.folder / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    (again,) = Folder(URL).read("ranks").targets
    assert again.key == target.key and (again.folder / "model.onnx").read_bytes() == files.scale(2)


@pytest.mark.parametrize(
    "key", ["ranks/1/../../../evil", "ranks//model.onnx", f"ranks/1/{'x' * 300}", "ranks/1/a/b/c/d/e/f/g/h/i"]
)
def test_keys_that_are_no_paths_are_refused(bucket: BucketServer, key: str) -> None:
    bucket.put("of/mine/ranks/1/model.onnx", files.scale(2))
    bucket.put(f"of/mine/{key}", b"x")
    with pytest.raises(LoadFailed, match=r"invalid path|no name that a file can have"):
        Folder(URL).read("ranks")


def test_errors_say_what_to_do(bucket: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--repository is 's3://nothing': s3://nothing: there is no such bucket$"):
        Folder("s3://nothing")
    bucket.put("of/mine/ranks/large.txt", b"\0" * (17 * MIB))
    with pytest.raises(LoadFailed, match=r"large.txt has 17825792 bytes; the limit of a file beside the versions is"):
        Folder(URL).read("ranks")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"127.0.0.1:9.*after 3 retries"):
        Folder(URL)
    monkeypatch.setattr(bucket_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"which needs obstore: pip install 'penstock\[s3\]'"):
        Folder(URL)


def test_a_wrong_key_is_access_denied(bucket: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto checks keys once it has a number of requests behind it."""
    import httpx

    bucket.put("of/mine/ranks/1/model.onnx", files.scale(2))
    try:
        httpx.post(f"{bucket.url}/moto-api/reset-auth", content=b"0")
        with pytest.raises(ValueError, match=r"access denied \(\w+\); check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"):
            Folder(URL)
    finally:
        httpx.post(f"{bucket.url}/moto-api/reset-auth", content=b"inf")


def test_a_server_of_a_bucket(bucket: BucketServer, tmp_path: Path) -> None:
    """It follows the bucket's file `generation`, and new versions take over."""
    pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
    bucket.put("of/mine/ranks/1/model.onnx", files.scale(2))
    bucket.put("of/mine/other/1/model.onnx", files.scale(5))
    bucket.put("of/mine/generation", b'["ranks"]')
    x = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    flags = ("--repository", URL, "--state-dir", "none", "--repository-cache", "64MiB")
    with serving(tmp_path / "log", *flags, model=None) as server:

        def first(name: str) -> float:
            answer = server.post(f"/v2/models/{name}/infer", {"inputs": [x]})
            return answer.json()["outputs"][0]["data"][0] if answer.status_code == 200 else -1.0

        assert first("ranks") == 2 and first("other") == -1
        bucket.put("of/mine/ranks/2/model.onnx", files.scale(3))
        answer = server.post("/v2/repository/models/ranks/load", {})
        assert answer.status_code == 200 and first("ranks") == 3, answer.text
        bucket.put("of/mine/generation", json.dumps(["other"]).encode())
        began = time.monotonic()
        wait_for(lambda: first("other") == 5 and first("ranks") == -1, "the models that the file lists")
        assert time.monotonic() - began < 3 * bucket_module.LOOK_SECONDS
        index = server.post("/v2/repository/index", {}).json()
        assert {row["name"] for row in index} == {"ranks", "other"}
