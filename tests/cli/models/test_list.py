"""`penstock list`: what is on this machine, also what is broken, and names that every command takes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.weights import cached_models as scanned
from tests.cli.conftest import RunCommand
from tests.patience import AT_ONCE
from tests.weights.standin_hub import StandInHub

GGUF = "acme/tiny-GGUF"
END = b"<end>"
PACKAGED_NAMES = ("python-8m", "smollm2-135m", "all-minilm-l6-v2")


def rows(run_command: RunCommand) -> dict[str, dict[str, object]]:
    done = run_command("list", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {row["name"]: row for row in found}


def test_the_models_of_a_new_installation(run_command: RunCommand, cache: Path) -> None:
    done = run_command("list")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["NAME", "FORMAT", "SIZE", "CONTEXT", "PARAMETERS", "MODIFIED", "WHERE"]
    python, smol, minilm = (line.split("  ") for line in lines)
    assert [cell.strip() for cell in python if cell][:5] == [
        "python-8m",
        "safetensors BF16",
        "17 MiB",
        "2,048",
        "8.39 M",
    ]
    assert [cell.strip() for cell in smol if cell][:5] == ["smollm2-135m", "GGUF Q4_1", "94 MiB", "8,192", "135 M"]
    assert [cell.strip() for cell in minilm if cell][:4] == ["all-minilm-l6-v2", "safetensors F32", "87 MiB", "256"]
    assert not cache.exists()


@pytest.mark.parametrize(("width", "last"), [(80, "MODIFIED"), (40, "FORMAT"), (5, "NAME"), (200, "WHERE")])
def test_a_narrow_terminal_shows_whole_columns(tmp_path: Path, width: int, last: str) -> None:
    head, *_, end = list_in_a_terminal(tmp_path, width)
    assert head.endswith(last)
    names = ["NAME", "FORMAT", "SIZE", "CONTEXT", "PARAMETERS", "MODIFIED", "WHERE"]
    missing = names[names.index(last) + 1 :]
    assert not missing or end == f"A wider terminal also shows: {', '.join(missing)}"


def list_in_a_terminal(home: Path, width: int) -> list[str]:
    """The lines that `penstock list` writes to a terminal of this width."""
    ours, theirs = os.openpty()
    environ = {**os.environ, "COLUMNS": str(width), "HF_HOME": str(home)}
    try:
        subprocess.run([sys.executable, "-m", "penstock", "list"], stdout=theirs, env=environ, check=True, timeout=60)
        os.write(theirs, END)  # what was written arrives in parts
        said = b""
        while not said.endswith(END):
            said += os.read(ours, 1 << 16)
        return said.removesuffix(END).decode().splitlines()
    finally:
        os.close(ours)
        os.close(theirs)


def test_downloaded_models(hub: StandInHub, run_command: RunCommand) -> None:
    for tag in ("Q8_0", "Q4_0"):
        assert run_command("pull", f"{GGUF}:{tag}").returncode == 0
    found = rows(run_command)
    q8, q4 = found[f"{GGUF}:Q8_0"], found[f"{GGUF}:Q4_0"]
    assert (q8["format"], q4["format"]) == ("GGUF Q8_0", "GGUF Q4_0")
    assert q8["size"] == len(hub.files["tiny-Q8_0.gguf"])
    assert q4["size"] == sum(len(content) for name, content in hub.files.items() if "Q4_0" in name)
    assert q8["parameters"] == q4["parameters"] and q8["context"] == q4["context"]
    assert q8["refs"] == ["main"] and q8["revision"] == hub.commit and q8["problem"] is None
    assert len(found) == len(PACKAGED_NAMES) + 2


def test_every_name_is_taken(
    hub: StandInHub, run_command: RunCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By plan, as an argument and in a file of settings; in short; and without the hub."""
    assert run_command("pull", f"{GGUF}:Q8_0").returncode == 0
    names = list(rows(run_command))
    hub.status = 503
    for name in [*names, "tiny-gguf:q8_0", "TINY-GGUF"]:
        assert run_command("plan", name).returncode == 0, name
        assert run_command("show", name).returncode == 0, name
    (tmp_path / "settings.yaml").write_text("model: tiny-GGUF\n")
    assert "tiny-Q8_0" in run_command("plan", "--config", str(tmp_path / "settings.yaml")).stdout
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert run_command("plan", names[-1]).returncode == 0


def test_revisions(dense_hub: StandInHub, run_command: RunCommand) -> None:
    assert run_command("pull", "acme/tiny").returncode == 0
    old = dense_hub.commit
    dense_hub.files["generation_config.json"] = b'{"temperature": 0.5}'
    dense_hub.commit = "b" * 40
    assert run_command("pull", "acme/tiny").returncode == 0
    lines = [line for line in run_command("list").stdout.splitlines() if line.startswith("acme/tiny")]
    assert len(lines) == 2 and old[:12] in lines[1] and "bbbb" not in lines[0]
    assert "temperature 0.5" in run_command("show", "acme/tiny").stdout
    assert "temperature 0.5" not in run_command("show", "acme/tiny", "--revision", old).stdout


def test_a_model_without_weights_is_not_usable(dense_hub: StandInHub, run_command: RunCommand) -> None:
    assert run_command("plan", "acme/tiny").returncode == 0
    row = rows(run_command)["acme/tiny"]
    assert (row["problem"], row["path"]) == ("no weights", None)
    assert "no weights" in run_command("list").stdout
    done = run_command("show", "acme/tiny")
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: acme/tiny is not complete on this machine: run penstock pull acme/tiny\n")


def test_a_lost_connection_leaves_an_incomplete_model(
    dense_hub: StandInHub, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
    dense_hub.lost = "model-00002-of-00002.safetensors"
    done = run_command("pull", "acme/tiny")
    assert done.returncode == 1 and "run it again: it continues where it stopped" in done.stderr
    assert rows(run_command)["acme/tiny"]["problem"] == "incomplete"
    dense_hub.lost = ""
    assert run_command("pull", "acme/tiny").returncode == 0
    assert rows(run_command)["acme/tiny"]["problem"] is None


def test_broken_folders_do_not_break_the_list(hub: StandInHub, run_command: RunCommand, cache: Path) -> None:
    assert run_command("pull", f"{GGUF}:Q8_0").returncode == 0
    (snapshot,) = cache.glob("*/snapshots/*")
    (snapshot / "a b (1)--x.gguf").symlink_to("tiny-Q8_0.gguf")
    for name in ("models--acme", "models--a--b--c", "datasets--acme--texts", "models--acme--\x1b[31mred"):
        (cache / name / "snapshots" / "0").mkdir(parents=True)
    (cache / "models--acme--file").write_bytes(b"")
    (cache / "models--acme--empty").mkdir()
    (cache / "models--acme--file2" / "snapshots").mkdir(parents=True)
    (cache / "models--acme--file2" / "snapshots" / "main").write_bytes(b"")
    for name, header in (("short", b"GGUF"), ("noise", os.urandom(4000)), ("huge", b"GGUF\3\0\0\0" + b"\xff" * 16)):
        folder = cache / f"models--acme--{name}" / "snapshots" / "0"
        folder.mkdir(parents=True)
        (folder / f"{name}.gguf").write_bytes(header)
    loop = cache / "models--acme--loop" / "snapshots" / "0"
    loop.mkdir(parents=True)
    (loop / "again").symlink_to(loop)
    (loop / "config.json").symlink_to(loop / "nowhere")
    config = cache / "models--acme--json" / "snapshots" / "0"
    config.mkdir(parents=True)
    (config / "config.json").write_bytes(b"[" * 10000)
    (config / "model.safetensors").write_bytes(b"\xff" * 100)
    (loop / "itself").symlink_to("itself")
    (cache / "models--acme--itself").symlink_to("models--acme--itself")
    (cache / "models--acme--pipe" / "refs").mkdir(parents=True)
    os.mkfifo(cache / "models--acme--pipe" / "refs" / "main")
    locked = cache / "models--acme--locked"
    locked.mkdir()
    locked.chmod(0)
    done = run_command("list")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()[1:]]
    broken = [f"acme/{name}" for name in ("huge", "json", "noise", "short")]
    shown = [name if name == "acme/json" else f"{name}:{name.removeprefix('acme/')}.gguf" for name in broken]
    assert names == [*PACKAGED_NAMES, *shown, f"{GGUF}:a", f"{GGUF}:Q8_0"]
    assert run_command("show", f"{GGUF}:a b (1)--x.gguf").returncode == 0
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == broken
    assert "\x1b" not in done.stdout + done.stderr


def test_large_caches_take_bounded_work(cache: Path, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(60):
        folder = cache / f"models--acme--m{i:02}" / "snapshots" / "0"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setattr(scanned, "MAX_REPOSITORIES", 50)
    started = time.monotonic()
    assert len(rows(run_command)) == len(PACKAGED_NAMES) + 50
    assert time.monotonic() - started < AT_ONCE
    monkeypatch.setattr("penstock.cli.models.list.HEADERS_SECONDS", 0.0)
    done = run_command("list")
    assert "smollm2-135m: not read within 0 s; penstock show reads it" in done.stderr


def test_it_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from penstock.cli.main import app\n"
        "try: app(['list'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'huggingface_hub.hf_api', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    home = {**os.environ, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=home, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
