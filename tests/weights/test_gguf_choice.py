"""Models in GGUF: which file is meant, in a folder and on a hub."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.families import load_spec
from penstock.gguf import read_gguf
from penstock.weights.gguf_choice import HubError, choose_gguf, gguf_models
from penstock.weights.hub import locate_model
from tests.gguf_models import write_gguf
from tests.weights.standin_hub import MODEL, StandInHub, serving
from tests.weights.test_hub import environment

__all__ = ["environment"]  # a fixture that every test here uses

PARTS = [f"big-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
FILES = [
    "m.Q4_0.gguf",
    "m.Q4_K.gguf",
    "m-q4_k_m.gguf",
    "m-IQ4_XS.gguf",
    *PARTS,
    "Q6_K/m-Q6_K-00001-of-00002.gguf",
    "Q6_K/m-Q6_K-00002-of-00002.gguf",
    "Q2_K/half-00001-of-00002.gguf",
    "mmproj-m-BF16.gguf",
    "../m-F32.gguf",
    "/m-F16.gguf",
    "README.md",
]


@pytest.mark.parametrize(
    ("tag", "chosen"),
    [
        ("Q4_0", ["m.Q4_0.gguf"]),
        ("q4_0", ["m.Q4_0.gguf"]),
        ("Q4_K", ["m.Q4_K.gguf"]),
        ("Q4_K_M", ["m-q4_k_m.gguf"]),
        ("IQ4_XS", ["m-IQ4_XS.gguf"]),
        ("Q8_0", PARTS),
        (PARTS[1], PARTS),
        ("Q6_K", ["Q6_K/m-Q6_K-00001-of-00002.gguf", "Q6_K/m-Q6_K-00002-of-00002.gguf"]),
        ("m.Q4_K.gguf", ["m.Q4_K.gguf"]),
    ],
)
def test_the_quantisation_names_one_model(tag: str, chosen: list[str]) -> None:
    assert choose_gguf("here", FILES, tag) == chosen


@pytest.mark.parametrize("tag", ["Q4", "S", "Q2_K", "BF16", "F32", "Q8_0.gguf"])
def test_an_unknown_quantisation_lists_what_is_there(tag: str) -> None:
    with pytest.raises(HubError) as caught:
        choose_gguf("here", FILES, tag)
    assert str(caught.value) == (
        f"here has no model in GGUF named {tag}; there are: Q6_K/m-Q6_K-00001-of-00002.gguf, "
        "big-Q8_0-00001-of-00002.gguf, m-IQ4_XS.gguf, m-q4_k_m.gguf, m.Q4_0.gguf, m.Q4_K.gguf"
    )


@pytest.mark.parametrize(("tag", "named"), [(None, ""), ("m", " named m")])
def test_several_are_listed(tag: str | None, named: str) -> None:
    with pytest.raises(HubError, match=rf"here has 2 models in GGUF{named}; name .*one of: m-Q3.gguf, m.Q5.gguf$"):
        choose_gguf("here", ["m-Q3.gguf", "m.Q5.gguf", "README.md"], tag)


def test_a_long_list_is_cut() -> None:
    with pytest.raises(HubError, match=r"m10.gguf, m11.gguf and 18 more$"):
        choose_gguf("here", [f"m{i:02}.gguf" for i in range(30)], None)


def test_an_incomplete_set_is_no_model() -> None:
    assert gguf_models(PARTS[:1]) == {} and gguf_models(PARTS[1:]) == {}
    with pytest.raises(HubError, match="here has no model in GGUF: no complete file"):
        choose_gguf("here", PARTS[1:], None)


@pytest.fixture(scope="module")
def files(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two quantisations of a model, one of them in parts, as a repository has them."""
    folder, source = tmp_path_factory.mktemp("repository"), tiny_checkpoint("qwen3")
    write_gguf(source, folder / "tiny-Q8_0.gguf", kind="Q8_0")
    (folder / "Q4_0").mkdir()
    write_gguf(source, folder / "Q4_0" / "tiny-Q4_0.gguf", kind="Q4_0", split_tensors=20)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.gguf")}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[StandInHub]:
    with serving({**files, "README.md": b"# tiny", "mmproj-F16.gguf": b"images"}) as hub:
        yield hub


@pytest.fixture
def fetch(hub: StandInHub, tmp_path: Path) -> Callable[..., Path]:
    def call(tag: str = "", *, weights: bool = True) -> Path:
        name = f"{MODEL}:{tag}" if tag else MODEL
        return locate_model(name, weights=weights, progress=False, endpoint=hub.url, cache=tmp_path / "cache")

    return call


def test_one_quantisation_is_downloaded(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    path = fetch("q8_0")
    assert path.name == "tiny-Q8_0.gguf" and path.read_bytes() == hub.files["tiny-Q8_0.gguf"]
    assert load_spec(path).family == "qwen3"
    assert {file.name for file in path.parent.rglob("*") if file.is_file()} == {path.name, "README.md"}
    hub.requests.clear()
    assert fetch("Q8_0", weights=False) == path
    assert not any("/resolve/" in place and method == "GET" for method, place, _ in hub.requests)


def test_all_parts_are_downloaded(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    path = fetch("Q4_0")
    parts = sorted(file.name for file in path.parent.iterdir())
    assert path.parent.name == "Q4_0" and parts == [f"tiny-Q4_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert read_gguf(path).path == path and load_spec(path).family == "qwen3"


def test_a_download_resumes_where_it_was(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # it resumes after whole chunks
    hub.cut_after["tiny-Q8_0.gguf"] = 5500
    assert fetch("Q8_0").read_bytes() == hub.files["tiny-Q8_0.gguf"]
    assert hub.served("tiny-Q8_0.gguf") == {"": 1, "bytes=5000-": 1}


def test_a_wrong_checksum_is_refused_and_not_kept(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    name = "Q4_0/tiny-Q4_0-00002-of-00002.gguf"
    hub.corrupt.add(name)
    with pytest.raises(HubError, match=f"{name} came with a wrong checksum and has been removed"):
        fetch("Q4_0")
    hub.corrupt.clear()
    assert read_gguf(fetch("Q4_0")).tensors


def test_several_quantisations_need_a_name(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    with pytest.raises(HubError, match=r"acme/tiny on the hub has 2 models in GGUF; name one of: Q4_0/.*tiny-Q8_0"):
        fetch()
    with pytest.raises(HubError, match=r"has no model in GGUF named Q5_0; there are: Q4_0/.*tiny-Q8_0.gguf"):
        fetch("Q5_0")
    assert not any("/resolve/" in path for _, path, _ in hub.requests)


@pytest.mark.parametrize("others", [{}, {"config.json": b"{}"}])
def test_the_only_one_needs_none(hub: StandInHub, fetch: Callable[..., Path], others: dict[str, bytes]) -> None:
    for name in [name for name in hub.files if name.startswith("Q4_0")]:
        del hub.files[name]
    hub.files |= others
    assert fetch().name == "tiny-Q8_0.gguf"
    hub.status = 503
    assert fetch().name == "tiny-Q8_0.gguf"


def test_a_cached_file_serves_while_the_hub_is_down(hub: StandInHub, fetch: Callable[..., Path]) -> None:
    path = fetch("Q8_0")
    hub.status = 503
    assert fetch("Q8_0") == path
    assert fetch() == path  # the only one in the cache
    with pytest.raises(HubError, match=r"the cache of acme/tiny has no model in GGUF named Q4_0; there are: tiny-Q8_0"):
        fetch("Q4_0")


def test_half_a_set_in_the_cache_does_not_serve(
    hub: StandInHub, fetch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
    hub.lost = "Q4_0/tiny-Q4_0-00002-of-00002.gguf"
    with pytest.raises(HubError, match="could not be downloaded"):
        fetch("Q4_0")
    hub.status = 503
    with pytest.raises(HubError, match=r"no model in GGUF|not complete in the cache"):
        fetch("Q4_0")


def test_a_file_and_a_folder_with_one_are_found(files: dict[str, bytes], tmp_path: Path) -> None:
    file = tmp_path / "models" / "tiny-Q8_0.gguf"
    file.parent.mkdir()
    file.write_bytes(files["tiny-Q8_0.gguf"])
    assert locate_model(str(file)) == file
    assert locate_model(str(file.parent)) == file
    with pytest.raises(HubError, match="is a file, which has no revisions; leave --revision v1 out"):
        locate_model(str(file), "v1")
    (file.parent / "other.gguf").write_bytes(b"")
    with pytest.raises(HubError, match=r"models has 2 models in GGUF; name one of: other.gguf, tiny-Q8_0.gguf"):
        locate_model(str(file.parent))
    (file.parent / "config.json").write_text("{}")  # as many repositories have it beside their files
    with pytest.raises(HubError, match="models has 2 models"):
        locate_model(str(file.parent))
    (file.parent / "model.safetensors").write_bytes(b"")
    assert locate_model(str(file.parent)) == file.parent


def test_a_folder_with_one_set_of_parts_is_found(files: dict[str, bytes], tmp_path: Path) -> None:
    for name, content in files.items():
        if name.startswith("Q4_0/"):
            (tmp_path / Path(name).name).write_bytes(content)
    assert locate_model(str(tmp_path)) == tmp_path / "tiny-Q4_0-00001-of-00002.gguf"


def test_another_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"abc")
    with pytest.raises(HubError, match="is a file; name a GGUF file, or the folder"):
        locate_model(str(tmp_path / "model.bin"))
