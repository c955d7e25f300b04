"""Tab in bash, in a terminal; and what zsh and fish get."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest

import penstock
from penstock.cli.completion import SCRIPTS
from penstock.config.settings import Settings
from penstock.declared.settings import SETTINGS
from tests.cli.conftest import RunCommand


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """HF_HOME with a model of two quantisations."""
    snapshot = tmp_path / "hub" / "models--acme--tiny-GGUF" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for tag in ("Q4_K_M", "Q8_0"):
        (snapshot / f"tiny-{tag}.gguf").write_bytes(b"GGUF")
    return tmp_path


def completions(line: str, home: Path) -> list[str]:
    """What a shell gets for a line, as its script asks."""
    environment = {**os.environ, "HF_HOME": str(home), "_PENSTOCK_COMPLETE": "complete_fish"}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": line}
    command = [sys.executable, "-m", "penstock"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    assert done.stderr == ""
    return [entry.partition("\t")[0] for entry in done.stdout.splitlines() if entry]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("penstock sh", ["show"]),
        ("penstock serve --quantization ", ["none", "int8", "int4", "fp8"]),
        ("penstock bench latency --quantization int", ["int8", "int4"]),
        ("penstock serve --kv-cache-d", ["--kv-cache-dtype"]),
        (
            "penstock serve ",
            ["python-8m", "smollm2-135m", "all-minilm-l6-v2", "acme/tiny-GGUF:Q4_K_M", "acme/tiny-GGUF:Q8_0"],
        ),
        ("penstock plan --model acme", ["acme/tiny-GGUF:Q4_K_M", "acme/tiny-GGUF:Q8_0"]),
        ("penstock rm acme/tiny-GGUF:Q8", ["acme/tiny-GGUF:Q8_0"]),
        ("penstock show nothing", []),
        ("penstock completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_words(home: Path, line: str, expected: list[str]) -> None:
    assert completions(line, home) == expected


def test_values_are_those_of_the_settings() -> None:
    for name, field in Settings.model_fields.items():
        choices = next((get_args(kind) for kind in get_args(field.annotation) if get_args(kind)), ())
        if choices and all(isinstance(choice, str) for choice in choices):
            assert SETTINGS[name].kind.choices == choices, name


def test_a_tab_imports_nothing_heavy(home: Path) -> None:
    code = (
        "import atexit, sys\n"
        "heavy = ('torch', 'transformers', 'tokenizers', 'huggingface_hub.hf_api', 'penstock.config')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from penstock.cli.main import main; main()"
    )
    environment = {**os.environ, "HF_HOME": str(home), "_PENSTOCK_COMPLETE": "complete_fish"}
    environment |= {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_ARGS": "penstock serve acme"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.stderr, done.stdout.count("acme")) == ("[]\n", 2)


def test_a_shell_without_a_script(run_command: RunCommand) -> None:
    done = run_command("completion", "tcsh")
    assert done.returncode == 2 and "there is no completion for 'tcsh'; there is for bash, zsh, fish" in done.stderr


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("penstock com\t", "penstock completion "),
        (
            "penstock serve acm\t8\t--quantization int8 --dt\tf\t",
            "penstock serve acme/tiny-GGUF:Q8_0 --quantization int8 --dtype float32 ",
        ),
        ("penstock show acme/tiny-GGUF:Q8\t", "penstock show acme/tiny-GGUF:Q8_0 "),
        ("penstock serve ./fol\t", "penstock serve ./folder/"),
    ],
)
def test_bash_in_a_terminal(home: Path, typed: str, line: str, tmp_path: Path) -> None:
    """The colon of a name is no obstacle, and a path is completed where no model is."""
    (tmp_path / "folder").mkdir()
    script = tmp_path / "completion.sh"
    function = f'penstock() {{ {sys.executable} -m penstock "$@"; }}\n'
    script.write_text(function + SCRIPTS["bash"] + "bind 'set enable-bracketed-paste off'; PS1='$ '\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.environ |= {
            "PYTHONPATH": str(Path(penstock.__file__).parent.parent),
            "HF_HOME": str(home),
            "TERM": "dumb",
            "HISTFILE": "/dev/null",
            "COLUMNS": "200",
        }
        os.execvp("bash", ["bash", "--noprofile", "--rcfile", str(script), "-i"])
    try:
        shown = read_until(terminal, "$ ")
        os.write(terminal, typed.encode())
        assert line in (shown := shown + read_until(terminal, line)), shown
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def read_until(terminal: int, text: str, seconds: float = 90.0) -> str:
    shown, deadline = "", time.monotonic() + seconds
    while text not in shown and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\x07", "")
    return shown
