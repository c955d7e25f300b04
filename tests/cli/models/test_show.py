"""`penstock show`: what a model is, without its weights and without the network."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.weights import GGUF_FORMATS
from penstock.text import Tokenizer
from tests.cli.conftest import RunCommand
from tests.gguf_models import write_gguf
from tests.smollm2 import smollm2
from tests.weights.standin_hub import StandInHub


def test_a_real_model(run_command: RunCommand) -> None:
    done = run_command("show", "smollm2-135m")
    assert (done.returncode, done.stderr) == (0, "")
    head, *lines = done.stdout.splitlines()
    assert head == "smollm2-135m"
    facts = {line[2:16].strip(): line[16:] for line in lines[: lines.index("")]}
    assert facts == {
        "path": str(smollm2()),
        "format": "GGUF Q4_1, 94 MiB",
        "architecture": "llama, 30 layers",
        "parameters": "135 M",
        "context": "8,192 tokens",
        "vocabulary": "49,152 tokens",
        "licence": "Apache-2.0",
        "checksums": "none (penstock manifest)",
        "sampling": "temperature 0, top_p 0.9, repetition_penalty 1.05, frequency_penalty 0.3",
        "chat template": "368 characters; --template prints it",
    }
    head, *types = lines[lines.index("") + 1 :]
    assert head.split("  ")[0] == "TYPE"
    assert [line.split() for line in types] == [
        ["Q4_1", "210", "106,168,320", "63", "MiB", "5", "5"],
        ["Q8_0", "1", "28,311,552", "29", "MiB", "8.5", "8.5"],
        ["F32", "61", "35,136", "137", "KiB", "32", "by", "--dtype", "and", "--quantization"],
    ]


def test_the_context_of_an_embedding_model_is_what_a_server_takes(run_command: RunCommand) -> None:
    """config.json has room for 512 positions; sentence-transformers' files say 256, and all-MiniLM was trained so."""
    assert json.loads(run_command("show", "all-minilm-l6-v2", "--json").stdout)["context"] == 256


def test_the_template_is_the_one_that_renders(run_command: RunCommand) -> None:
    from jinja2 import Environment

    source = run_command("show", "smollm2-135m", "--template").stdout
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    template = Tokenizer.load(smollm2()).chat_template
    assert template is not None
    prompt = Environment().from_string(source).render(messages=messages, add_generation_prompt=True)
    assert prompt.removesuffix("\n") == template.render(messages).removesuffix("\n")


def test_json(run_command: RunCommand) -> None:
    """Says the same; a folder of safetensors has its card's licence."""
    found = json.loads(run_command("show", "python-8m", "--json").stdout)
    assert (found["format"], found["licence"], found["layers"]) == ("safetensors BF16", "apache-2.0", 8)
    (bf16,) = found["types"]
    assert bf16["weights"] == found["parameters"] == 8_393_984 and bf16["bits_per_weight"] == 16
    assert bf16["bits_per_weight_in_memory"] is None
    assert list(found["chat_templates"]) == ["default"]
    types = json.loads(run_command("show", "smollm2-135m", "--json").stdout)["types"]
    assert types[0]["bits_per_weight_in_memory"] == GGUF_FORMATS["Q4_1"].bits_per_weight


def test_a_downloaded_model_has_a_licence(
    dense_hub: StandInHub, run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command("pull", "acme/tiny").returncode == 0
    dense_hub.requests.clear()
    done = run_command("show", "acme/tiny")
    assert done.returncode == 0 and "licence       apache-2.0\n" in done.stdout
    assert not dense_hub.requests


def test_a_model_that_is_not_here_is_not_downloaded(hub: StandInHub, run_command: RunCommand) -> None:
    done = run_command("show", "acme/tiny-GGUF:Q8_0")
    assert done.returncode == 2
    assert done.stderr == (
        "penstock: acme/tiny-GGUF:Q8_0 is not complete on this machine: run penstock pull acme/tiny-GGUF:Q8_0\n"
    )
    assert not hub.requests


def test_an_architecture_that_is_not_supported(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, run_command: RunCommand
) -> None:
    """Is shown all the same, with the reason."""
    file = write_gguf(tiny_checkpoint("qwen3"), tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    assert file is not None and content.count(b"qwen3") > 1
    (tmp_path / "tiny.gguf").write_bytes(content.replace(b"qwen3", b"qw\x1b[3"))
    done = run_command("show", str(tmp_path / "tiny.gguf"))
    assert done.returncode == 0, done.stderr
    assert "not usable    " in done.stdout and "general.architecture" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "'nothing' is neither a folder"),
        (("smolm2-135m",), "did you mean smollm2-135m?"),
        (("smollm2-135m", "--revision", "main"), "has no revisions"),
        ((__file__,), "is a file; name a GGUF file"),
    ],
)
def test_mistakes(cache: Path, run_command: RunCommand, arguments: tuple[str, ...], words: str) -> None:
    done = run_command("show", *arguments)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_a_model_without_a_template(
    cache: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path, run_command: RunCommand
) -> None:
    for file in tiny_checkpoint("qwen3").iterdir():
        if file.name not in ("chat_template.jinja", "tokenizer_config.json"):
            (tmp_path / file.name).symlink_to(file)
    done = run_command("show", str(tmp_path), "--template")
    assert done.returncode == 2 and "has no chat template; it completes texts" in done.stderr
    assert "none: completes texts" in run_command("show", str(tmp_path)).stdout


def test_it_loads_no_torch() -> None:
    code = (
        "import sys; from penstock.cli.main import app\n"
        "try: app(['show', 'smollm2-135m'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "smollm2-135m" in done.stdout, os.linesep + done.stderr
