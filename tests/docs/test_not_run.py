"""Commands of the pages that are not run: the programs and files that they name, and their flags, are there."""

import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from pip._internal.commands import create_command

from penstock.cli.main import app
from penstock.cli.usage import command_of, run_app
from penstock.config.server import ServerConfig
from penstock.config.settings import Settings
from tests.chaos import __main__ as chaos
from tests.clients import __main__ as clients
from tests.clients.matrix import CLIENTS
from tests.docs.pages import ROOT, blocks, pages
from tests.packaging.test_dockerfile import values
from tests.packaging.test_systemd import PROGRAM, TEMPLATE, UNIT, option

FOREIGN = ("aiperf", "git", "lm_eval", "ray")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _not_run() -> list[tuple[str, str]]:
    """(place, command) of each; those that need another Python are among them."""
    pairs = [(block, text) for page in pages() for block in blocks(page) if block.is_shell for text in block.commands()]
    left = [(block, text) for block, text in pairs if block.mark("not run", text) or block.mark("needs", text)]
    left += [(block, text) for block in blocks(ROOT / "CONTRIBUTING.md") for text in block.commands()]
    return [(block.where, text) for block, text in left]


@pytest.mark.parametrize(
    "command", [pytest.param(text, id=f"{where} {text.split(maxsplit=1)[0]}") for where, text in _not_run()]
)
def test_what_a_command_names_is_there(command: str, tiny_checkpoint: Callable[..., Path]) -> None:
    match [word for word in shlex.split(command, comments=True) if word != "sudo"]:
        case ["penstock", "serve", _, *flags]:
            gpus = ["--dtype", "bfloat16", "--hardware", "2xH100"]
            assert run_app(app, ["plan", str(tiny_checkpoint("qwen3")), *flags, *gpus]) == 0
        case ["penstock", *words]:
            path, found = command_of(typer.main.get_command(app), words)
            found.make_context(path, words[len(path.split()) - 1 :])
        case ["pip" | "/opt/penstock/bin/pip", name, *words]:
            _check_pip(name, words)
        case ["make", *words]:
            _check_make(words)
        case ["docker", "build", *words]:
            (argument, context) = words[words.index("--build-arg") + 1], words[-1]
            assert argument.partition("=")[0] in values("ARG") and context == "."
        case ["docker", "run", *words]:
            _check_docker_run(words)
        case ["python3", "-m", "venv", folder]:
            assert f"{folder}/bin/penstock" == PROGRAM
        case ["install", "-D", "-m", _, source, target]:
            assert (ROOT / source).is_file()
            instance = [TEMPLATE.name, "small.yaml"]
            known = [UNIT.name, "penstock.yaml", Path(option("EnvironmentFile").removeprefix("-")).name, *instance]
            folder = "/etc/systemd/system" if target.endswith(".service") else "/etc/penstock"
            assert target in [f"{folder}/{name}" for name in known]
        case ["systemctl", "enable", "--now", unit] | ["journalctl", "--unit", unit, "--follow"]:
            assert f"{unit}.service" in (UNIT.name, TEMPLATE.name.replace("@", "@small"))
        case ["python", "-m", "tests.clients", name, _]:
            assert f"python -m tests.clients {name} FOLDER [NAME...]" in (clients.__doc__ or "")
        case ["TEST_CLIENTS=FOLDER", "pytest", *words]:
            assert (ROOT / words[-1]).is_file()
        case ["LLAMA" | "python", script, *_]:
            assert (ROOT / script).is_file()
        case [script] if script.startswith("scripts/"):
            subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
        case [program, *_]:
            assert program in FOREIGN


def _check_pip(name: str, words: list[str]) -> None:
    """pip knows the flags, and the project the packages."""
    options, wanted = create_command(name).parse_args(words)
    assert all((ROOT / file).is_file() for file in options.constraints)
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    known = {Requirement(text).name: str(Requirement(text).specifier) for group in extras.values() for text in group}
    others = {client.package for client in CLIENTS} | {"aiperf"}
    for text in wanted:
        if text == "dist/penstock-*.whl":
            continue
        requirement = Requirement(text)
        if "==" in text:
            assert text in (ROOT / "Makefile").read_text()
        else:
            assert requirement.name in others or str(requirement.specifier) == known[requirement.name], text


def _check_make(words: list[str]) -> None:
    """make has the target, and the program the arguments."""
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", *words]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    last = shlex.split(done.stdout.splitlines()[-1])
    if "tests.chaos" in last:
        root = typer.Typer()
        root.command()(chaos.main)
        arguments = last[last.index("tests.chaos") + 1 :]
        given = typer.main.get_command(root).make_context("chaos", arguments).params
        known = {experiment.number for experiment in (*chaos.EXPERIMENTS, chaos.SOAK)}
        assert {number for number in given["only"].split(",") if number} <= known
    assert [word for word in last if word.startswith("tests/") and not (ROOT / word).exists()] == []


def _check_docker_run(words: list[str]) -> None:
    """The image has the port, the volumes and the setting, and the server ends before Docker kills it."""
    given = dict(pairwise(words))
    assert given["--publish"].rpartition(":")[2] in values("EXPOSE")
    mounted = {word.rpartition(":")[2] for flag, word in pairwise(words) if flag == "--volume"}
    assert mounted == {folder for line in values("VOLUME") for folder in line.split()}
    name = given["--env"].partition("=")[0]
    assert name.removeprefix("PENSTOCK_").lower() in Settings.model_fields
    assert int(given["--stop-timeout"]) > ServerConfig().drain_timeout
    assert words[-1] == "penstock"


def test_there_are_such_commands() -> None:
    assert len(_not_run()) > 20
