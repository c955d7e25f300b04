"""The command line itself: quick, and clear about mistakes."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command

from penstock.cli.main import app
from penstock.cli.options import ENGINE, SERVER
from penstock.cli.sections import SECTIONS
from penstock.config.defaults import DEFAULTS
from penstock.config.settings import Settings
from penstock.weights.packaged import EMBEDDED
from tests.cli.conftest import RunCommand

HEAVY = (
    "torch",
    "transformers",
    "starlette",
    "uvicorn",
    "huggingface_hub",
    "tokenizers",
    "numpy",
    "zmq",
    "prompt_toolkit",
)


def penstock(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=120, check=False)


def test_help_imports_nothing_heavy() -> None:
    """Of all commands, one after the other in one process."""
    commands = [[], ["serve"], ["run"], ["plan"], ["bench"], ["list"], ["pull"], ["show"], ["rm"], ["models"]]
    commands += [["completion"], *(["bench", one] for one in ("throughput", "latency", "quality", "serve"))]
    code = (
        "import sys; from penstock.cli.main import app\n"
        f"for command in {commands!r}:\n"
        "    try: app([*command, '--help'])\n"
        "    except SystemExit as end: code = end.code\n"
        f"    heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    if heavy or code: sys.exit(f'{command} ended with {code} and imported {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == len(commands)


def test_every_setting_is_a_flag() -> None:
    assert {*ENGINE, *SERVER} - {"config"} == set(Settings.model_fields) - {"model"}


def test_help_has_every_flag_once_and_those_of_settings_below_headings(run_command: RunCommand) -> None:
    assert {name for names in SECTIONS.values() for name in names} == {*ENGINE, *SERVER} - {"seed"}  # run has its own
    for command in (["serve"], ["run"], ["plan"], ["batch"], ["verify"], ["embed"], ["bench", "quality"]):
        shown = run_command(*command, "--help").stdout
        sections = dict(re.findall(r"^(\S[^:\n]*):\n((?:  .*\n|$)+)", shown, re.MULTILINE))
        assert "--max-model-len" in sections["Memory and batches"] and "--help" in sections["Options"], command
        assert "--dtype" in sections["Model"] and ("Server" in sections) == (command[0] in ("serve", "plan"))
        flags = re.findall(r"^  (--[a-z0-9-]+)", shown, re.MULTILINE)
        assert len(flags) == len(set(flags)) and {flag_of(name) for name in ENGINE} <= {*flags}


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_the_list_of_commands_has_whole_sentences(run_command: RunCommand) -> None:
    for command in ((), ("bench",)):
        rows = run_command(*command, "--help").stdout.partition("Commands:\n")[2].splitlines()
        assert rows and all(row.endswith(".") and not row.endswith("...") for row in rows), rows


def test_numbers_in_help_are_the_defaults() -> None:
    checked = 0
    for name, annotation in {**ENGINE, **SERVER}.items():
        [option] = annotation.__metadata__
        if found := re.search(r"Default: (\d+(?:\.\d+)?)\.$", option.help):
            assert float(DEFAULTS[name](None).value) == float(found[1]), name  # type: ignore[arg-type]
            checked += 1
    assert checked >= 15


def test_without_a_command_there_is_help(run_command: RunCommand) -> None:
    done = run_command()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run_command("--help").stdout
    commands = done.stdout.partition("Commands:")[2]
    assert "serve" in commands and "..." not in commands


def test_lines_of_usage_have_the_arguments_names(capsys: pytest.CaptureFixture[str]) -> None:
    """Required ones without braces, which typer 0.29 adds."""
    root: Any = get_command(app)
    paths = [[name] for name in root.commands] + [["bench", name] for name in root.commands["bench"].commands]
    for path in paths:
        root([*path, "--help"], prog_name="penstock", standalone_mode=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Usage:")]
    assert len(lines) == len(paths) >= 20
    assert not [line for line in lines if "{" in line]
    assert {"Usage: penstock pull [OPTIONS] MODEL", "Usage: penstock batch [OPTIONS] REQUESTS ANSWERS"} < {*lines}


def test_version(run_command: RunCommand) -> None:
    assert run_command("--version").stdout.startswith("penstock 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "./no-such-folder"), ("no-such-folder",)),
        (("bench", "serve", "--url", "127.0.0.1:8000"), ("--url", "http://127.0.0.1:8000")),
        (("plan", "--model", "./no-such-folder"), ("no-such-folder",)),
        (("serve", "./this", "--model", "./that"), ("./this", "./that", "leave one out")),
        (("plan", "--dtype", "float8"), ("--dtype", "float8", "bfloat16")),
        (("plan", "--max-model-len", "0"), ("--max-model-len", "0")),
        (("plan", "--max-model-len", "32k"), ("'32k': give a whole number from 1", "; 32k is 32768")),
        (("run", "python-8m", "x", "--max-tokens", "2K"), ("'2K': give a whole number from 1 on; 2K is 2048",)),
        (("serve", "--api-key", "a", "--api-key", "b"), ("--api-key is given twice", "leave one out")),
        (("plan", "--host", "::1", "--host=127.0.0.1", "--host", "::1"), ("--host is given 3 times",)),
        (("plan", "--served-model-name", "a", "--served-model-name", "b"), ("put commas between the values",)),
        (("plan", "--model", "./this", "--model", "./that"), ("--model is given twice",)),
        (("run", "--system", "a", "python-8m", "--system", "b"), ("--system is given twice",)),
        (("top", "--api-key", "a", "--api-key", "b"), ("--api-key is given twice",)),
        (
            ("serve", "smollm2-135m", "all-minilm-l6-v2"),
            ("takes one model", "penstock serve --repository models", "penstock serve all-minilm-l6-v2 --port 8001"),
        ),
        (("plan", "--max-model-len", "999999999"), ("--max-model-len", "999999999")),
        (("plan", "--kv-cache-memory", "lots"), ("--kv-cache-memory", "lots")),
        (("plan", "--kv-cache-memory", "1KiB"), ("--kv-cache-memory",)),
        (("plan", "--config", "no-such-file.yaml"), ("no-such-file.yaml",)),
        (("bench", "throughput", "--cases", "8x"), ("8x", "NxIN/OUT")),
        (
            ("bench", "throughput", EMBEDDED, "--cases", "1x8/8,1x99999/4"),
            ("--cases 1x99999/4 takes 100003", "at most 2048"),
        ),
        (("bench", "latency", "--cases", "1x50/15", "--max-model-len", "64"), ("--cases 1x50/15 takes 65", "is 64")),
        (("bench", "latency", "--cases", "1x2/2", "--max-model-len", "32"), ("warm-up takes 40", "--max-model-len")),
        (("bench", "serve", "--slo", "speed=1"), ("ttft", "speed=1")),
        (("bench", "serve", "--slo", "ttft=soon"), ("ttft=soon", "in seconds")),
        (("bench", "serve", "--request-rate", "0"), ("--request-rate", "0")),
        (("bench", "serve", "--output-len", "9-3"), ("--output-len", "LOW-HIGH", "9-3")),
        (("run", "hello"), ("no model 'hello'", "name the model too: penstock run smollm2-135m hello")),
        (("run", "What", "is", "this?"), ("no model 'What'", 'quotes around them: penstock run "What is this?"')),
        (("run", "python-8m"), ("the prompt is empty",)),
        (("run", "python-8m", "x", "--top-p", "2"), ("--top-p is '2'", "from 0 to 1")),
        (("run", "python-8m", "x", "--raw", "--system", "y"), ("--system needs a chat", "leave --system out")),
        (("plan", __file__), ("test_help.py is a file", "folder")),
        (("plan", "--json", "no-such-folder/plan.json"), ("--json", "no-such-folder")),
        (("plan", "--max-num-seqs", "100000000"), ("does not fit", "set --max-num-seqs")),
        (("plan", "--hardware", "8xH1000"), ("--hardware", "8xH1000", "H100")),
    ],
)
def test_a_mistake_is_one_clear_line(
    run_command: RunCommand, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    done = run_command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: ") and done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_of_numbers_and_choices_the_last_one_holds(run_command: RunCommand) -> None:
    """So an alias or a script can be overridden."""
    done = run_command("plan", EMBEDDED, "--port", "1", "--dtype", "float32", "--port", "2", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "float32" not in done.stdout


def test_a_mistake_ends_the_process_with_2_and_no_traceback() -> None:
    done = penstock("plan", "--dtype", "float8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("penstock: --dtype")


def test_a_full_disk_is_one_clear_line() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "penstock", "plan"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr == "penstock: [Errno 28] No space left on device\n"


def test_plan_shows_memory_and_sources_without_torch(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "settings.yaml").write_text("max-num-seqs: 7\n")
    code = (
        "import sys; from penstock.cli.main import app\n"
        f"try: app(['plan', '--config', {str(tmp_path / 'settings.yaml')!r}, '--max-model-len', '512'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    wide = {**os.environ, "COLUMNS": "300"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, env=wide
    )
    assert done.returncode == 0, done.stderr
    for word in ("weights", "KV cache", "free", "max_num_seqs", "settings.yaml", "command line"):
        assert word in done.stdout
