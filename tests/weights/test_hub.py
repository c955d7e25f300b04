"""Models from a hub: what is fetched, what is resumed, what is verified, and what each failure says."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.families import load_spec
from penstock.weights import hub_listing
from penstock.weights.hub import HubError, locate_model, pull_model
from penstock.weights.hub_cache import ModelFolder
from penstock.weights.hub_listing import ListedFile, check_content
from penstock.weights.hub_snapshot import Snapshot
from tests.patience import AT_ONCE
from tests.weights.standin_hub import MODEL, TOKEN, StandInHub, described, serving

EXTRAS = {
    "pytorch_model.bin": b"a pickle",
    "modeling_tiny.py": b"raise SystemExit",
    "consolidated.safetensors": b"the same weights again",
    "onnx/model.safetensors": b"not at the top",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def hub(tiny_checkpoint: Callable[..., Path]) -> Iterator[StandInHub]:
    folder = tiny_checkpoint("qwen3", shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with serving(files | EXTRAS) as hub:
        yield hub


@pytest.fixture
def fetch(hub: StandInHub, tmp_path: Path) -> Callable[..., Path]:
    """locate_model against the stand-in, with a cache of the test's own."""

    def call(revision: str | None = None, *, name: str = MODEL, weights: bool = True) -> Path:
        return locate_model(name, revision, weights=weights, progress=False, endpoint=hub.url, cache=tmp_path / "cache")

    return call


def assert_complete(folder: Path, hub: StandInHub) -> None:
    for name, content in hub.files.items():
        if name not in EXTRAS:
            assert (folder / name).read_bytes() == content, name


def test_a_model_is_downloaded_without_what_is_not_needed(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    folder = fetch()
    assert_complete(folder, hub)
    assert folder.name == hub.commit
    assert not any((folder / name).exists() for name in EXTRAS)
    assert load_spec(folder).family == "qwen3"


def test_a_second_time_nothing_is_transferred(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    folder = fetch()
    hub.requests.clear()
    assert fetch() == folder
    assert not any("/resolve/" in path and method == "GET" for method, path, _ in hub.requests)


def test_a_plan_needs_no_weights(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    folder = fetch(weights=False)
    assert load_spec(folder).family == "qwen3"
    assert not list(folder.glob("*.safetensors"))
    assert_complete(fetch(), hub)


def test_a_download_that_breaks_off_resumes_where_it_was(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # it resumes after whole chunks
    name = "model-00001-of-00002.safetensors"
    hub.cut_after[name] = 5500
    assert_complete(fetch(), hub)
    assert hub.served(name) == {"": 1, "bytes=5000-": 1}


@pytest.mark.parametrize("size", [1, 5000, 10**6])
def test_a_damaged_part_is_not_kept(hub: StandInHub, fetch: Callable[..., Path], tmp_path: Path, size: int) -> None:
    """Of an earlier run. One that is longer than the file starts again at once."""
    name = "model-00001-of-00002.safetensors"
    lfs = described(name, hub.files[name])["lfs"]
    assert isinstance(lfs, dict) and len(hub.files[name]) < 10**6
    part = tmp_path / "cache" / "models--acme--tiny" / "blobs" / f"{lfs['sha256']}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"\xff" * size)
    if size < len(hub.files[name]):
        with pytest.raises(HubError, match=rf"{name} came with a wrong checksum and has been removed"):
            fetch()
        assert not part.exists()
    assert_complete(fetch(), hub)


def test_a_mirror_that_sends_whole_files_only(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.whole_files_only = True
    hub.cut_after["model-00001-of-00002.safetensors"] = 5500
    assert_complete(fetch(), hub)


def test_a_download_that_breaks_off_for_good_keeps_the_files_that_are_complete(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
    hub.lost = "model-00002-of-00002.safetensors"
    with pytest.raises(HubError, match=r"could not be downloaded .*; run it again: it continues"):
        fetch()
    hub.lost = ""
    hub.requests.clear()
    assert_complete(fetch(), hub)
    assert not hub.served("model-00001-of-00002.safetensors")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_a_wrong_checksum_is_refused_and_not_kept(hub: StandInHub, fetch: Callable[..., Path], name: str) -> None:
    hub.corrupt.add(name)
    with pytest.raises(HubError, match=rf"{name} came with a wrong checksum and has been removed"):
        fetch()
    hub.corrupt.clear()
    hub.requests.clear()
    assert_complete(fetch(), hub)
    fetched = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert [path.rpartition("/")[2] for path in fetched].count(name) == 1


def test_a_revision_is_a_branch_or_a_commit(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    assert fetch("main") == fetch(hub.commit)
    with pytest.raises(HubError, match="no revision 'v9'; check --revision"):
        fetch("v9")


def test_an_unknown_model(fetch: Callable[..., Path]) -> None:
    with pytest.raises(HubError, match=r"no model acme/other, or it is private.*HF_TOKEN"):
        fetch(name="acme/other")


def test_a_private_model_needs_the_token(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = True
    with pytest.raises(HubError, match="HF_TOKEN"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert_complete(fetch(), hub)


def test_a_gated_model(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    hub.status, hub.error_code = 403, "GatedRepo"
    with pytest.raises(HubError, match=f"is gated: accept its terms at {hub.url}/{MODEL}"):
        fetch()


@pytest.mark.parametrize("weights", [False, True])
def test_a_gated_model_that_is_described(hub: StandInHub, fetch: Callable[..., Path], weights: bool) -> None:
    """As the real hub does it: only the content of files is refused."""
    hub.gated = True
    with pytest.raises(HubError, match=f"^acme/tiny is gated: accept its terms at {hub.url}/{MODEL}"):
        fetch(weights=weights)


def test_a_token_without_the_right(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    hub.status = 403
    with pytest.raises(HubError, match=r"refuses access.*HF_TOKEN"):
        fetch()


@pytest.mark.parametrize("status", [500, 503])
def test_a_hub_that_is_down_without_a_cached_model(hub: StandInHub, fetch: Callable[..., Path], status: int) -> None:
    hub.status = status
    with pytest.raises(HubError, match=r"cannot be reached.*not complete in the cache"):
        fetch()


def test_a_cached_model_serves_while_the_hub_is_down(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    folder = fetch()
    hub.status = 503
    assert fetch() == folder
    assert fetch(hub.commit) == folder


def test_a_cached_model_serves_when_it_has_left_the_hub(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    folder = fetch()
    hub.name = "acme/renamed"
    assert fetch() == folder
    hub.status = 403
    assert fetch() == folder


def test_a_cached_model_serves_offline(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read from the environment once, at import
    hub.requests.clear()
    assert fetch() == folder
    assert not hub.requests


def test_half_a_model_in_the_cache_does_not_serve(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    fetch(weights=False)
    hub.status = 503
    assert load_spec(fetch(weights=False)).family == "qwen3"
    with pytest.raises(HubError, match="not complete in the cache"):
        fetch()


def test_no_hub_at_all(tmp_path: Path) -> None:
    with serving({}) as hub:
        url = hub.url
    with pytest.raises(HubError, match=r"cannot be reached \(Connect"):
        locate_model(MODEL, progress=False, endpoint=url, cache=tmp_path)


def test_a_model_of_pickles_is_refused_before_anything_is_downloaded(
    hub: StandInHub, fetch: Callable[..., Path]
) -> None:
    for name in [name for name in hub.files if name.startswith("model")]:
        del hub.files[name]
    del hub.files["consolidated.safetensors"]
    with pytest.raises(HubError, match=r"no model\.safetensors; pytorch_model\.bin is not read"):
        fetch()
    assert not any("/resolve/" in path for _, path, _ in hub.requests)


def test_a_repository_that_is_no_model(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    del hub.files["config.json"]
    with pytest.raises(HubError, match=r"no config\.json"):
        fetch()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate_model(str(tmp_path)) == tmp_path
    with pytest.raises(HubError, match="leave --revision v1 out"):
        locate_model(str(tmp_path), "v1")


@pytest.mark.parametrize(
    "name",
    [
        "nowhere",
        "nowhere.gguf",
        "a/b:",
        "a/b:c:d",
        "/no/such/folder",
        "./a/b",
        "a/b/c",
        "../b",
        "a/..",
        "a/b\0",
        "",
        "-a/b",
    ],
)
def test_what_is_neither_a_folder_nor_an_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HubError, match=r"neither a folder, a GGUF file|there is no file or folder"):
        locate_model(name)


def test_a_file_that_would_lie_outside_of_the_snapshot_is_not_written(
    hub: StandInHub, fetch: Callable[..., Path], tmp_path: Path
) -> None:
    hub.files["../../../model-x.safetensors"] = b"escape"
    hub.files["model-/../../../../../y.safetensors"] = b"escape"
    with pytest.raises(HubError):
        fetch()
    assert b"escape" not in {path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_slow_hub_is_named(
    hub: StandInHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.observe.reporting.FIRST_SECONDS", 0.1)
    hub.delay = 0.5
    locate_model(MODEL, weights=False, endpoint=hub.url, cache=tmp_path)
    assert re.search(rf"{MODEL}: waiting for {hub.url} \(\d+ s\)\n", capsys.readouterr().err)


def test_what_is_not_downloaded(tmp_path: Path) -> None:
    """Digests become names of files, so that only digests are accepted. Files beyond the limit of HTTP are refused."""

    def file(digest: str, size: int = 5) -> ListedFile:
        return ListedFile("x.gguf", size, digest, True, "1" * 40)

    other = Snapshot("a/b", None, None, (), "http://127.0.0.1:1", tmp_path)
    good, commit = file("0" * 64), "1" * 40
    large = other._hub_file(good, ModelFolder(tmp_path, "a/b"), commit)
    assert large.blob == tmp_path / "models--a--b" / "blobs" / good.digest
    assert large.url == f"http://127.0.0.1:1/a/b/resolve/{commit}/x.gguf"
    for wrong in (file("../../../x"), file(good.digest.upper() + "A"), file(""), file(good.digest, -1), file("0" * 40)):
        with pytest.raises(HubError, match="states neither size nor digest"):
            check_content("a/b", wrong)
    with pytest.raises(HubError, match=r"64424509440 bytes; the limit of a download is .*: run hf download a/b"):
        other._check_sizes([other._hub_file(file(good.digest, 60 << 30), ModelFolder(tmp_path, "a/b"), commit)])


def outside(tmp_path: Path, before: set[Path]) -> set[Path]:
    """The files that were written elsewhere than in the model's folder of the cache."""
    model = tmp_path / "cache" / "models--acme--tiny"
    return {path for path in tmp_path.rglob("*") if path.is_file() and model not in path.parents} - before


@pytest.mark.parametrize("commit", ["../../../../escaped", "main", "0" * 39, "0" * 41, "G" * 40, "0" * 40 + "/../x"])
def test_a_commit_is_40_hexadecimal_digits(
    hub: StandInHub, fetch: Callable[..., Path], tmp_path: Path, commit: str
) -> None:
    hub.commit = commit
    with pytest.raises(HubError, match="a commit is 40 hexadecimal digits"):
        fetch()
    assert outside(tmp_path, set()) == set()


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
def test_what_a_hub_says_while_it_sends_a_file_becomes_no_path(
    hub: StandInHub, fetch: Callable[..., Path], tmp_path: Path, header: str
) -> None:
    hub.headers = {header: '"../../../../escaped"'}
    assert_complete(fetch(), hub)
    assert outside(tmp_path, set()) == set()
    assert not any("escaped" in str(path) for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model-00001-of-00002.safetensors"])
def test_a_hub_that_sends_more_than_it_listed_is_stopped(
    hub: StandInHub, fetch: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.padding[name] = 64 << 20
    with pytest.raises(HubError, match=rf"{name} came with a wrong checksum and has been removed"):
        fetch()
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink())
    assert written <= sum(map(len, hub.files.values())) + 4096


def test_a_file_of_which_nothing_is_stated_is_refused(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    hub.unstated = "config.json"
    with pytest.raises(HubError, match=r"states neither size nor digest of config\.json"):
        fetch()


def test_an_endless_list_of_files_is_cut_off(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weights.hub_listing.MAX_BYTES", 10_000)
    hub.files |= {f"file-{i}.txt": b"" for i in range(200)}
    with pytest.raises(HubError, match="more than 10000 bytes, the limit"):
        fetch()


class NotWanted(BaseException):  # as asyncio.CancelledError is
    pass


@pytest.mark.parametrize("what", ["the list", "tokenizer.json", "model-00001-of-00002.safetensors"])
def test_a_hub_that_drips_holds_nobody(hub: StandInHub, tmp_path: Path, what: str) -> None:
    """A byte now and then keeps every timeout of a connection from passing."""
    hub.drips.add(what)
    calls = 0

    def watch(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise NotWanted

    began = time.monotonic()
    with pytest.raises(NotWanted):
        pull_model(MODEL, progress=False, watch=watch, endpoint=hub.url, cache=tmp_path)
    assert time.monotonic() - began < AT_ONCE
    left = [thread for thread in threading.enumerate() if thread.name.startswith(("hub", "download"))]
    assert all(thread.daemon for thread in left)


def test_a_list_that_drips_is_given_up(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.drips.add("the list")
    monkeypatch.setattr(hub_listing.interruptible, "__defaults__", (1.0,))
    with pytest.raises(HubError, match=r"cannot be reached \(TimeoutError: no whole answer came within 1 s"):
        fetch()


def test_huggingface_hub_finds_what_was_downloaded(hub: StandInHub, fetch: Callable[..., Path], tmp_path: Path) -> None:
    """The cache is shared with other programs."""
    from huggingface_hub import scan_cache_dir, snapshot_download

    folder = fetch()
    hub.status = 503
    patterns = ["*.json", "model-*.safetensors"]
    found = snapshot_download(MODEL, cache_dir=tmp_path / "cache", local_files_only=True, allow_patterns=patterns)
    assert Path(found) == folder
    (repository,) = scan_cache_dir(tmp_path / "cache").repos
    assert {revision.commit_hash for revision in repository.revisions} == {hub.commit}
    assert repository.refs.keys() == {"main"}
    assert all(path.is_symlink() for path in folder.iterdir())
