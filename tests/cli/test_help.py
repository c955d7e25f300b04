"""The command line itself: quick, and clear about mistakes."""

import os
import subprocess
import sys

import pytest

from penstock.cli.options import ENGINE, SERVER
from penstock.config.settings import Settings

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "huggingface_hub", "tokenizers", "numpy", "zmq")


def penstock(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=120, check=False)


@pytest.mark.parametrize(
    "command",
    [(), ("serve",), ("run",), ("plan",), ("bench",), *(("bench", one) for one in ("throughput", "kernels", "step"))],
)
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    code = (
        "import sys; from penstock.cli.main import app\n"
        f"try: app({[*command, '--help']!r})\n"
        "except SystemExit as end: code = end.code\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout


def test_every_setting_is_a_flag() -> None:
    assert {*ENGINE, *SERVER} - {"config"} == set(Settings.model_fields) - {"model"}


def test_version() -> None:
    assert penstock("--version").stdout.startswith("penstock 0.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "./no-such-folder"), ("no-such-folder",)),
        (("plan", "--dtype", "float8"), ("--dtype", "float8", "bfloat16")),
        (("plan", "--max-model-len", "0"), ("--max-model-len", "0")),
        (("plan", "--max-model-len", "999999999"), ("--max-model-len", "999999999")),
        (("plan", "--kv-cache-memory", "lots"), ("--kv-cache-memory", "lots")),
        (("plan", "--kv-cache-memory", "1KiB"), ("--kv-cache-memory",)),
        (("plan", "--config", "no-such-file.yaml"), ("no-such-file.yaml",)),
        (("bench", "throughput", "--cases", "8x"), ("8x", "NxIN/OUT")),
        (("bench", "step", "--rows", "1,0"), ("--rows", "1,0")),
        (("bench", "kernels", "--ops", "linear,convolution"), ("--ops", "convolution", "linear", "attention")),
        (("bench", "kernels", "--isa", "mmx"), ("--isa", "mmx")),
        (("bench", "serve", "--slo", "speed=1"), ("ttft", "speed=1")),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = penstock(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


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
