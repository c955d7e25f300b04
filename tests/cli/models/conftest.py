"""A hub on loopback, and a Hugging Face cache of the test's own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gguf_models import write_gguf
from tests.weights.standin_hub import StandInHub, serving

CARD = b"---\nlicense: apache-2.0\nlanguage: en\n---\n# tiny\n"


@pytest.fixture(scope="session")
def gguf_files(tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Two quantisations of a model, one of them in parts."""
    folder, source = tmp_path_factory.mktemp("repository"), tiny_checkpoint("qwen3")
    write_gguf(source, folder / "tiny-Q8_0.gguf", kind="Q8_0")
    write_gguf(source, folder / "tiny-Q4_0.gguf", kind="Q4_0", split_tensors=20)
    return {path.name: path.read_bytes() for path in folder.glob("*.gguf")}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of commands in this process. huggingface_hub reads the environment once."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def use(hub: StandInHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes commands in this process take this hub."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture
def hub(gguf_files: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """acme/tiny-GGUF with two quantisations, as the hub of commands in this process."""
    with serving({**gguf_files, "README.md": CARD}, "acme/tiny-GGUF") as hub:
        use(hub, monkeypatch)
        yield hub


@pytest.fixture
def dense_hub(
    tiny_checkpoint: Callable[..., Path], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StandInHub]:
    """acme/tiny, two shards of safetensors, as the hub of commands in this process."""
    files = {path.name: path.read_bytes() for path in tiny_checkpoint("qwen3", shards=2).iterdir()}
    with serving({**files, "README.md": CARD}) as hub:
        use(hub, monkeypatch)
        yield hub


def start(*arguments: str, hub: StandInHub, home: Path) -> subprocess.Popen[str]:
    """Starts `penstock` in a process of its own, with that hub and that HF_HOME."""
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
