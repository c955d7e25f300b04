"""Measures the perplexity of what `penstock quantize` wrote in Penstock and in other engines, over the same token ids.

    python benchmarks/quantised_readers.py MODEL... --work DIR --python transformers=../llmcompressor/bin/python \\
        --python vllm=../vllm/bin/python --python llama.cpp=../llama/bin/python

A MODEL is a folder, which transformers and vLLM read, or a GGUF file, which llama.cpp reads. All are of one vocabulary.
Penstock computes as `penstock serve` does. "difference" is Penstock's perplexity over the other engine's.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from results import JSON, run_command, save

from penstock.cli.output import show_table

PEERS = Path(__file__).parent / "peers"
SCRIPTS = {
    "transformers": "transformers_perplexity.py",
    "vllm": "vllm_perplexity.py",
    "llama.cpp": "llama_cpp_perplexity.py",
}
COLUMNS = (
    ("model", "model"),
    ("other engine", "peer"),
    ("its perplexity", "theirs"),
    ("Penstock's", "ours"),
    ("difference %", "difference_percent"),
    ("±", "margin"),
)


def ours(model: Path, ids: Path, windows: int) -> list[float]:
    """The mean of -log p of each window. Writes the windows' ids, unless they are there."""
    result = ids.with_name("penstock.json")
    which = ("--tokens-in", str(ids)) if ids.exists() else ("--windows", str(windows), "--tokens-out", str(ids))
    command = (sys.executable, "-m", "penstock", "bench", "quality", str(model), *which, "--json", str(result))
    subprocess.run(command, check=True, stdout=sys.stderr)
    [row] = json.loads(result.read_text())["results"]
    found: list[float] = row["windows"]
    return found


def theirs(python: str, script: str, model: Path, ids: Path) -> dict[str, Any]:
    """The line of a peer's script."""
    command = (python, str(PEERS / script), str(ids), str(model))
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    return found


def readers(
    *,
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...")],
    work: Annotated[Path, typer.Option(metavar="DIR", help="Keep the token ids here.")],
    python: Annotated[list[str], typer.Option(metavar="ENGINE=PATH", help=f"A Python that has {', '.join(SCRIPTS)}.")],
    windows: Annotated[int, typer.Option(min=2, help="Windows of 512 tokens to score.")] = 16,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    """Scores the models with Penstock and with every engine that reads them."""
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in models:
        mine = ours(model, work / "windows.json", windows)
        for engine, path in (text.split("=", 1) for text in python):
            if (engine == "llama.cpp") == model.is_dir():
                continue
            peer = theirs(path, SCRIPTS[engine], model, work / "windows.json")
            rows.append(_row(model.name, f"{peer['peer']} {peer['version']}", mine, peer["windows"]))
            show_table("so far", COLUMNS, rows[-1:])
    show_table(f"perplexity of {windows} windows of pydoc_data.topics", COLUMNS, rows)
    save({"benchmark": "quantised_readers", "rows": rows}, json_file)


def _row(model: str, peer: str, mine: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """`mine` and `others` are means of windows of equal length. The margin is half the 95% interval's width."""
    differences = [a - b for a, b in zip(mine, others, strict=True)]
    change = 100 * math.expm1(fmean(differences))
    margin = (100 + change) * 1.96 * stdev(differences) / math.sqrt(len(differences))
    perplexities = {"ours": round(math.exp(fmean(mine)), 4), "theirs": round(math.exp(fmean(others)), 4)}
    return {
        "model": model,
        "peer": peer,
        **perplexities,
        "difference_percent": round(change, 3),
        "margin": round(margin, 3),
    }


if __name__ == "__main__":
    run_command(readers)
