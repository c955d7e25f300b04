"""The disk tier of a real server: texts come back after eviction, a restart and kill -9, with equal answers."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from penstock.weights.packaged import EMBEDDED
from tests.e2e.server import Server, gauge, serving
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port

# The KV cache has room for two texts, not for four.
FLAGS = ("--max-model-len", "512", "--max-num-seqs", "2", "--speculation", "off", "--kv-cache-memory", "3MiB")
LINE = "def function_{n}(first, second):\n    return first * {n} + second\n\n\n"


def text(start: int) -> str:
    return "".join(LINE.replace("{n}", str(n)) for n in range(start, start + 14))


def ask(server: Server, prompt: str) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0.0}).json()
    assert "usage" in answer, answer
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def count(server: Server, name: str) -> float:
    return gauge(httpx.get(server.url + "/metrics", timeout=PATIENCE).text, f"penstock_kv_disk_{name}")


def blocks(folder: Path) -> list[Path]:
    return list(folder.glob("*/*"))


def test_texts_come_back_after_eviction_and_after_kill_9(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with serving(tmp_path / "log", *FLAGS, "--kv-disk", f"{folder},64MiB") as server:
        first, cached = ask(server, text(100))
        assert cached == 0
        for start in (200, 300, 400):
            ask(server, text(start))
        wait_for(lambda: count(server, "writes_total") >= 60, "the blocks to be written")
        again, cached = ask(server, text(100))
        assert again == first and cached >= 160 and count(server, "reads_total") >= 10

        os.kill(server.engine_pid, signal.SIGKILL)
        before = count(server, "reads_total")
        again, cached = ask(server, text(100))
        assert again == first and cached >= 160 and count(server, "reads_total") > before

        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in blocks(folder)} == {0o600}
        assert server.post("/reset_prefix_cache", {}).json() == {"reset": True}
        wait_for(lambda: not blocks(folder), "the files to be deleted")
        assert ask(server, text(100)) == (first, 0)


@pytest.mark.rare
def test_a_restart_with_spoilt_files_and_a_second_server(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    flags = (*FLAGS, "--kv-disk", f"{folder},64MiB")
    with serving(tmp_path / "log", *flags) as server:
        answers = [ask(server, text(start))[0] for start in (100, 200)]
        command = [sys.executable, "-m", "penstock", "serve", EMBEDDED, "--port", str(free_port()), "--threads", "1"]
        other = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=PATIENCE)
        assert other.returncode == 1
        assert f"{folder} is used by another engine, process {server.engine_pid}: name another" in other.stderr
    assert len(blocks(folder)) >= 30  # also those that were not written yet when the server was ended
    spoilt = [path for path in blocks(folder) if path.name[0] in "01234567"]
    for path in spoilt:
        with path.open("r+b") as file:
            file.seek(200)
            file.write(b"spoilt")
    with serving(tmp_path / "log2", *flags) as server:
        assert [ask(server, text(start))[0] for start in (100, 200)] == answers
        assert count(server, "failures_total") >= 1 and count(server, "reads_total") >= 1


@pytest.mark.rare
def test_a_full_disk_keeps_what_fits(tmp_path: Path) -> None:
    """A file system of 2 MiB, where this process may mount one."""
    folder = tmp_path / "kv"
    folder.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=2M,mode=700", "none", str(folder)], capture_output=True, timeout=60
        ).returncode
    ):
        pytest.skip("this process may not mount a file system")
    try:
        with serving(tmp_path / "log", *FLAGS, "--kv-disk", f"{folder},1GiB") as server:
            answers = [ask(server, text(i * 100))[0] for i in range(20)]
            wait_for(lambda: count(server, "failures_total") > 0, "the disk to be full")
            assert [ask(server, text(i * 100))[0] for i in range(20)] == answers
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=60)
