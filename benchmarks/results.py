"""Writes a benchmark's figures as JSON, with where they come from: commit, date, processor and the peers' versions."""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import typer

CPUS = sorted(os.sched_getaffinity(0))  # read at import: native kernels pin the thread that starts them
CORES = len(CPUS)
OUTPUTS = ("benchmarks/results", "docs/images")
JSON = typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")


def provenance(peers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The commit, the date, the machine and, if peers ran, their versions by name."""
    found: dict[str, Any] = {
        "commit": commit_of(Path(__file__).parent),
        "date": datetime.date.today().isoformat(),
        "hardware": {
            "cpu": _processor(),
            "cores": CORES,
            **_instruction_sets(),
            "python": platform.python_version(),
        },
    }
    return found | ({"peers": dict(peers)} if peers else {})


def commit_of(folder: Path) -> str:
    """The commit of the work tree around `folder`, such as "abc1234", or "abc1234-dirty" if files were changed.

    Result files and plots do not count as changes: a run that writes several does not mark the later ones as dirty.
    """
    git = ["git", "-C", str(folder)]
    commit = _output([*git, "rev-parse", "--short", "HEAD"])
    if not commit:  # no history, as in an archive; scripts/gpu_check.sh then takes the commit from COMMIT
        return os.environ.get("COMMIT", "unknown")
    changed = _output([*git, "status", "--porcelain", "--", ":/", *(f":(top,exclude){each}" for each in OUTPUTS)])
    return f"{commit}-dirty" if changed else commit


def write(result: Mapping[str, Any], path: Path | None, *, peers: Mapping[str, str] | None = None) -> None:
    """Prints the figures with their provenance, and writes the same to `path` if one is given."""
    print(_text(result, peers))
    save(result, path, peers=peers)


def save(result: Mapping[str, Any], path: Path | str | None, *, peers: Mapping[str, str] | None = None) -> None:
    """Writes the figures with their provenance to `path`; does nothing if that is None."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(_text(result, peers) + "\n")


def run_command(command: Callable[..., None]) -> None:
    """Runs a script's command with the flags of the command line. An error in these is one line, and the status 2."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except ValueError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns an argument parser with the option that every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    return made


def tokens_counted(case: str) -> int:
    """The tokens that a case's rate counts: output tokens, or the prompts' tokens if each has one output token."""
    count, _, lengths = case.partition("x")
    prompt, _, output = lengths.partition("/")
    return int(count) * int(prompt if output == "1" else output)


def _text(result: Mapping[str, Any], peers: Mapping[str, str] | None) -> str:
    return json.dumps(msgspec.to_builtins({**provenance(peers), **result}), indent=2)


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _processor() -> str:
    """The processor's name, family and model. Hypervisors often shorten the name, to "AMD EPYC" for example."""
    first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    if "model name" not in facts:
        return platform.machine()
    return f"{facts['model name']} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def _instruction_sets() -> dict[str, str]:
    """The instruction set that Penstock's native kernels use ("none" if there are none for this machine), and the
    processor's best one if that is another."""
    from penstock.kernels.native.loader import instruction_sets, processor_sets

    used, best = next(iter(instruction_sets()), "none"), next(iter(processor_sets()), "none")
    return {"isa": used} if used == best else {"isa": used, "best_isa": best}
